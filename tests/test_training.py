"""The training scripts at a size that takes seconds on a CPU."""

import json
import lzma
import math
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "training"))

import fast_paths  # noqa: E402
import muon  # noqa: E402
import prepare  # noqa: E402
import score  # noqa: E402
import texts  # noqa: E402
import train  # noqa: E402

PAGE = """<html><head><title>x</title></head><body><nav>menu</nav><div role="main"><h1>Bisect<a class="headerlink"
href="#">¶</a></h1><p>Keeps a <code>list</code>   sorted &amp; small.</p><ul><li><p>one</p></li><li>two</li></ul>
<pre>def f():
    return 1</pre></div><div class="sphinxsidebar">links</div></body></html>"""


def test_html_to_text_keeps_code_and_drops_navigation():
    text = texts.html_to_text(PAGE)
    assert text == "# Bisect\n\nKeeps a `list` sorted & small.\n\n- one\n\n- two\n\ndef f():\n    return 1\n"


def test_unique_blocks_drops_repeated_paragraphs():
    licence, body = "licence text " * 20, "what is new here " * 30
    seen: set[bytes] = set()
    documents = [("a", f"{licence}\n\n{body}a"), ("b", f"{licence}\n\n{body}b"), ("c", f"{licence}\n\n{body}a")]
    kept = dict(texts.unique_blocks(documents, seen))
    assert list(kept) == ["a", "b"]
    assert licence.strip() in kept["a"]
    assert licence.strip() not in kept["b"]


def test_split_depends_on_names_only():
    documents = [(f"{i}.html", "x" * 1000) for i in range(500)]
    source = {"name": "s", "heldout": 50_000}
    kept, held = prepare.split(source, documents)
    assert 20 < len(held) < 120
    assert {n for n, _ in kept} | {n for n, _ in held} == {n for n, _ in documents}
    assert prepare.split(source, documents[::-1])[1] == held[::-1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder made of this repository's own licence."""
    folder = tmp_path_factory.mktemp("data")
    text = (ROOT / "LICENSE").read_text()
    tokenizer = prepare.train_tokenizer([text], folder / "tokenizer", 400)
    with lzma.open(folder / "train.u16.xz", "wb") as file:
        file.write(prepare.encode(tokenizer, [text] * 4).tobytes())
    (folder / "heldout").mkdir()
    (folder / "heldout" / "licence.txt").write_text(text[:3000] + "\n<|endoftext|>\n" + text[3000:6000])
    return folder


def test_a_given_tokenizer_is_taken_as_it_is(data: Path, tmp_path: Path):
    taken = prepare.take_tokenizer(data / "tokenizer", tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (data / "tokenizer" / name).read_bytes()
    text = (ROOT / "LICENSE").read_text()
    with lzma.open(data / "train.u16.xz") as file:
        assert prepare.encode(taken, [text] * 4).tobytes() == file.read()


def tiny(folder: Path, **training: int) -> Path:
    """Write the shipped configuration, shrunk."""
    config = json.loads((ROOT / "training" / "docs_gdn.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "full_attention_interval": 2}
    heads = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_value_heads": 2}
    linear = {"linear_num_key_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config["model"] |= sizes | heads | linear | {"vocab_size": 512}
    config["training"] |= {"length": 64, "batch": 4, "steps": 12, "warmup": 2, "log_every": 4, "evaluate_every": 6}
    config["training"] |= training
    path = folder / "tiny.json"
    path.write_text(json.dumps(config))
    return path


def test_a_tiny_run_learns_and_exports_an_ordinary_folder(data: Path, tmp_path: Path):
    output = tmp_path / "run"
    result = train.main(["--config", str(tiny(tmp_path)), "--data", str(data), "--output", str(output)])
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = [e["loss"] for e in log if "loss" in e]
    assert losses[-1] < losses[0] < math.log(512) + 0.5
    assert log[-1]["bits_per_byte"] == result
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "model")
    assert model.config.model_type == "qwen3_5_text"
    stored = safetensors_torch.load_file(output / "model" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in stored.values()) == log[0]["parameters"]  # the tied embedding is stored once
    text = "Copyright  2024\n    indented (text), §\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    parts = score.load_heldout(data / "heldout", tokenizer)
    # what is loaded back is the trained model, rounded to bfloat16
    assert score.evaluate(model, parts, length=64)["all"] == pytest.approx(result["all"], rel=5e-3)


def test_the_shipped_model_predicts_heldout_text():
    folder = ROOT / "src" / "replayssm" / "models" / "docs_gdn"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 12e6
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = score.load_heldout(folder.parent / "heldout", tokenizer)
    assert len(parts["rust"][0]) > 131_072
    tokens, size = parts["python"]
    assert score.bits_per_byte(model, tokens, size, length=1024, limit=2048) < 1.5


def test_a_resumed_run_is_the_uninterrupted_run(data: Path, tmp_path: Path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    config = tiny(tmp_path)
    expected = train.main(["--config", str(config), "--data", str(data), "--output", str(whole)])
    arguments = ["--config", str(config), "--data", str(data), "--output", str(halves)]
    train.main([*arguments, "--stop", "5"])
    result = train.main([*arguments, "--resume"])
    assert result["all"] == pytest.approx(expected["all"], rel=1e-5)


def test_orthogonalise_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 24, 64), (2, 64, 24)):
        values = torch.linalg.svdvals(muon.orthogonalise(torch.randn(shape)))
        assert 0.5 < values.min() <= values.max() < 1.4


def test_shifted_convolution_is_the_stock_convolution():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 6, 11), torch.randn(6, 4), torch.randn(6)
    for activation in ("silu", None):
        expected = stock.causal_conv1d_fn(x, weight, bias, activation=activation)
        torch.testing.assert_close(fast_paths.causal_conv1d(x, weight, bias, activation), expected)


def test_time_steps_start_inside_the_configured_range():
    config = json.loads((ROOT / "training" / "docs_gdn.json").read_text())
    model = train.build(config)
    assert 5.0e6 <= sum(p.numel() for p in model.parameters()) <= 5.3e6
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(parameter)
            assert 0.00099 <= step.min() <= step.max() <= 0.101


def test_schedule_warms_up_holds_and_falls_to_zero():
    assert [train.schedule(p, s, 10, 0.5) for p, s in ((0.0, 0), (0.3, 50), (0.75, 90), (1.0, 99))] == [0.1, 1, 0.5, 0]


def test_batches_cover_an_epoch_once():
    batches = train.Batches(torch.arange(1000, dtype=torch.int16), length=10, batch=4, seed=0)
    windows = torch.cat([batches(step)[0] for step in range(batches.per_epoch)])
    assert len(windows.unique()) == windows.numel() > 900
    x, y = batches(batches.per_epoch)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_parallel_delta_rule_is_the_stock_one():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

    torch.manual_seed(0)
    shapes = ((2, 300, 2, 16), (2, 300, 2, 16), (2, 300, 4, 32))
    tensors = [torch.randn(s) for s in shapes] + [-0.1 * torch.rand(2, 300, 4), torch.rand(2, 300, 4)]
    tensors[1][:, 5:90] = tensors[1][:, 5:6]  # equal keys are the hard case for the inverse
    weight = torch.randn(2, 300, 4, 32)
    results = []
    for function in (stock.torch_chunk_gated_delta_rule, fast_paths.chunk_gated_delta_rule):
        inputs = [x.clone().requires_grad_() for x in tensors]
        query, key = (x.repeat_interleave(2, dim=2) for x in inputs[:2])  # what every stock version accepts
        out = function(query, key, *inputs[2:], use_qk_l2norm_in_kernel=True)[0]
        (out * weight).sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
