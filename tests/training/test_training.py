"""The training scripts at a size that takes seconds on a CPU."""

import itertools
import json
import lzma
import math
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "training"))

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


TINY = {
    "gdn": {"num_hidden_layers": 2, "full_attention_interval": 2, "head_dim": 16, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "linear_num_value_heads": 2, "linear_num_key_heads": 1}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "mamba2": {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 16}
    | {"num_attention_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16},
    "kda": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "v_head_dim": 16}
    | {"mlp_layer_types": ["dense", "dense"], "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "linear_num_heads": 2, "linear_head_dim": 16},
}


def tiny(folder: Path, architecture: str = "gdn", **training: int) -> Path:
    """Write a shipped configuration, shrunk."""
    config = json.loads(train.ARCHITECTURES[architecture].read_text())
    config["model"] |= TINY[architecture] | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 512}
    config["training"] |= {"length": 64, "batch": 4, "steps": 12, "warmup": 2, "log_every": 4, "evaluations": 2}
    config["training"] |= training
    path = folder / "tiny.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("architecture", TINY)
def test_a_tiny_run_learns_and_exports_an_ordinary_folder(architecture: str, data: Path, tmp_path: Path):
    output, config = tmp_path / "run", tiny(tmp_path, architecture)
    result = train.main(["--config", str(config), "--data", str(data), "--out", str(output)])
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = [e["loss"] for e in log if "loss" in e]
    assert losses[-1] < losses[0] < math.log(512) + 0.5
    assert [e["step"] for e in log if "bits_per_byte" in e] == [6, 12]
    assert log[-1]["bits_per_byte"] == result
    assert (output / "loss.png").stat().st_size > 10_000
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "model")
    assert model.config.model_type == json.loads(config.read_text())["model_type"]
    stored = safetensors_torch.load_file(output / "model" / "model.safetensors")
    # transformers keeps this one parameter of kimi_linear wide
    assert {t.dtype for name, t in stored.items() if not name.endswith("dt_bias")} == {torch.bfloat16}
    assert sum(t.numel() for t in stored.values()) == log[0]["parameters"]  # a tied embedding is stored once
    text = "Copyright  2024\n    indented (text), §\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    parts = score.load_heldout(data / "heldout", tokenizer)
    # what is loaded back is the trained model, rounded to bfloat16, on the stock path
    assert score.evaluate(model, parts, length=64)["all"] == pytest.approx(result["all"], rel=5e-3)


def test_a_run_ends_with_its_seconds_at_a_rate_of_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, output = tiny(tmp_path, warmup=1, log_every=1), tmp_path / "run"
    ticks = itertools.count()
    monkeypatch.setattr(train.time, "monotonic", lambda: float(next(ticks)))  # a second whenever one looks
    train.main(["--config", str(config), "--data", str(data), "--out", str(output), "--seconds", "120"])
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    rates = [e["rate"] for e in log if "rate" in e]
    assert rates[0] > 0.99
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1
    assert log[-1]["step"] > 12  # the number of steps does not end it
    assert 100 < log[-1]["seconds"] < 120


def test_pace_follows_the_clock_and_never_falls(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    pace = train.Pace(begin=100.0, seconds=130.0, steps=7, done=0.2)
    now[0] = 110.0
    assert pace(3) == 0.2  # nothing is reached before the first step
    pace.start = 110.0
    now[0] = 160.0
    assert pace(3) == pytest.approx(0.6)  # half of the 100 seconds between the start and the ending
    pace.ending = 0.0
    assert pace(3) == pytest.approx(0.6)
    now[0] = 230.0
    assert pace(4) == 1.0
    assert train.Pace(begin=0.0, seconds=None, steps=8, done=0.0)(2) == 0.25


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
    expected = train.main(["--config", str(config), "--data", str(data), "--out", str(whole)])
    arguments = ["--config", str(config), "--data", str(data), "--out", str(halves)]
    train.main([*arguments, "--stop", "5"])
    result = train.main([*arguments, "--resume"])
    assert result["all"] == pytest.approx(expected["all"], rel=1e-5)


def test_orthogonalise_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 24, 64), (2, 64, 24)):
        values = torch.linalg.svdvals(muon.orthogonalise(torch.randn(shape)))
        assert 0.5 < values.min() <= values.max() < 1.4


@pytest.mark.parametrize(("architecture", "millions"), [("gdn", 5.14), ("mamba2", 4.8), ("kda", 4.81)])
def test_weights_start_as_configured(architecture: str, millions: float):
    model = train.build(json.loads(train.ARCHITECTURES[architecture].read_text()))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * millions, rel=1e-3)
    assert model.get_input_embeddings().padding_idx is None  # or the separator, token 0, would learn nothing
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(parameter)
            assert 0.00099 <= step.min() <= step.max() <= 0.101


def test_embeddings_and_the_output_layer_are_no_matrices_for_muon():
    model = train.build(json.loads(train.ARCHITECTURES["kda"].read_text()))
    optimiser = muon.Optimiser(model, 0.1, 0.1, 0.1)
    assert (4096, 192) not in optimiser.groups
    assert {id(p) for g in optimiser.adam.param_groups for p in g["params"]} >= {
        id(model.get_output_embeddings().weight),
        id(model.get_input_embeddings().weight),
    }
    count = sum(len(g["params"]) for g in optimiser.adam.param_groups) + sum(map(len, optimiser.groups.values()))
    assert count == len(list(model.parameters()))


def test_schedule_warms_up_holds_and_falls_to_zero():
    assert [train.schedule(p, s, 10, 0.5) for p, s in ((0.0, 0), (0.3, 50), (0.75, 90), (1.0, 99))] == [0.1, 1, 0.5, 0]


def test_batches_cover_an_epoch_once():
    batches = train.Batches(torch.arange(1000, dtype=torch.int16), length=10, batch=4, seed=0)
    windows = torch.cat([batches(step)[0] for step in range(batches.per_epoch)])
    assert len(windows.unique()) == windows.numel() > 900
    x, y = batches(batches.per_epoch)
    assert torch.equal(x[:, 1:], y[:, :-1])
