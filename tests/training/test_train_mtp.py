"""Training a multi-token-prediction head at a size that takes seconds on a CPU."""

import json
import lzma
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "training"))

import score_mtp  # noqa: E402
import train_mtp  # noqa: E402
from replayssm import models  # noqa: E402
from replayssm.engine.mtp_head import MtpHead  # noqa: E402

SMALL = ("--length", "32", "--batch", "4", "--evaluate-tokens", "70", "--log-every", "4", "--warmup", "2")


@pytest.fixture(scope="module")
def tiny() -> tuple:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3_5TextConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            pad_token_id=0,
        )
    ).eval()
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (2, 13))
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.detach()
    return model, MtpHead(model).eval(), tokens, hidden


def test_a_depth_sees_what_the_drafter_will_see(tiny):
    """Each start alone: true pairs up to it, then what the head said and the following tokens, token by token."""
    _, head, tokens, hidden = tiny
    states = train_mtp.drafts(head, tokens, hidden, 3)
    assert [tuple(s.shape) for s in states] == [(2, 10, 32)] * 3
    for start in (0, 1, 6, 9):
        cache = transformers.DynamicCache()
        causal = torch.ones(start + 1, start + 1, dtype=torch.bool).tril()[None, None]
        places = torch.arange(start + 1)[None]
        state = head(tokens[:, 1 : start + 2], hidden[:, : start + 1], places, cache, causal)[:, -1:]
        torch.testing.assert_close(states[0][:, start], state[:, 0], rtol=1e-4, atol=1e-5)
        for depth in (1, 2):
            at = start + depth
            state = head(tokens[:, at + 1 : at + 2], state, torch.tensor([[at]]), cache)
            torch.testing.assert_close(states[depth][:, start], state[:, 0], rtol=1e-4, atol=1e-5)


def test_acceptance_counts_what_follows_right_tokens_only(tiny, monkeypatch):
    model, head, tokens, hidden = tiny
    wanted = head.output(hidden).argmax(-1)
    weight = model.get_output_embeddings().weight

    def perfect(_head, window, _hidden, depths):
        starts = window.shape[1] - depths
        states = [hidden[:, d : d + starts].clone() for d in range(1, depths + 1)]
        states[0][0, :5] = -states[0][0, :5]  # 5 of 20 are wrong at the first depth
        return states

    monkeypatch.setattr(train_mtp, "drafts", perfect)
    wrong = (-hidden[0, 1:6] @ weight.T).argmax(-1) != wanted[0, 1:6]
    assert wrong.all()
    right = train_mtp.agreement(model, head, tokens, 3, 2)
    assert train_mtp.rates(right)["after"] == [0.75, 1.0, 1.0]
    wanted_fewer = train_mtp.soft_loss(torch.zeros(4, 8), torch.randn(4, 8))
    assert wanted_fewer.item() == pytest.approx(np.log(8))


def test_rates_of_depths():
    """Six starts of which a draft reaches depth two at three, and depth three at one."""
    right = torch.tensor(
        [
            [[1, 1, 0, 1, 0, 0]],
            [[1, 0, 0, 0, 1, 1]],
            [[1, 1, 1, 1, 0, 1]],
        ],
        dtype=torch.bool,
    )
    found = train_mtp.rates(right)
    assert found["alone"] == [0.5, 0.5, round(5 / 6, 4)]
    assert found["after"] == [0.5, round(1 / 3, 4), 1.0]
    assert found["again"] == [0.75, round(1 / 3, 4), 0.0]  # of four starts that have two more behind them
    none = train_mtp.rates(torch.zeros(2, 1, 3, dtype=torch.bool))
    assert none == {"alone": [0.0, 0.0], "after": [0.0, 0.0], "again": [0.0, 0.0]}


def _with_head(model: Path, head: Path, place: Path) -> Path:
    """A folder with a model's files and this head."""
    folder = place / "with_head"
    shutil.copytree(model, folder)
    shutil.copy(head / "mtp.safetensors", folder)
    return folder


def test_a_run_on_the_shipped_model_learns_and_writes_a_head(tmp_path: Path):
    folder = models.path(models.DEFAULT)
    model, tokenizer = models.load(folder, torch.float32)
    ids = tokenizer("".join(models.heldout("python"))[:20000])["input_ids"]
    with lzma.open(tmp_path / "train.u16.xz", "wb") as file:
        file.write(np.array(ids, dtype=np.uint16).tobytes())
    (tmp_path / "heldout").mkdir()
    (tmp_path / "heldout" / "one.txt").write_text(models.heldout("stdlib")[0][:2000])
    out = tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--out", str(out), "--heldout", str(tmp_path / "heldout"), *SMALL]
    result = train_mtp.main([*arguments, "--steps", "12"])
    log = [json.loads(line) for line in (out / "mtp_log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert [len(each) for each in losses] == [3, 3, 3]
    assert sum(losses[-1]) < sum(losses[0])
    assert log[-1]["heldout"] == result
    assert len(result["one"]) == 3
    assert log[0]["parameters"] == 640_384
    written = out / "mtp.safetensors"
    shipped = sum(p.stat().st_size for p in folder.iterdir() if not p.name.startswith("mtp"))
    assert written.stat().st_size + shipped < 12e6 - 50_000
    head = MtpHead.load(model, out)
    tokens = torch.tensor([ids[:60]])
    right = train_mtp.agreement(model, head, tokens[:, :40], 3, 1)
    assert right.shape == (3, 1, 37)
    place = ["--model", str(_with_head(folder, out, tmp_path)), "--heldout", str(tmp_path / "heldout")]
    again = score_mtp.main([*place, "--length", "32", "--tokens", "70"])
    assert again["one"] == again["all"]
    assert again["one"]["after"] == result["one"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit, match="another tokenizer"):
        train_mtp.main([*arguments, "--steps", "1"])
