"""The measurement against what it stands for: stock models, plain decoding, attention written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm import Layout, Precision, ReplayCache, ReplayError, Rows, step
from replayssm.drift.attention import attend
from replayssm.drift.bins import Bins, Sums
from replayssm.drift.layer import step_tokens
from replayssm.drift.policies import DEFAULT, REFERENCE, parse
from replayssm.drift.rows import comparisons, fit
from support.makers import CORNERS, generator, random_inputs, take

CPU = torch.device("cpu")


def test_names_of_policies() -> None:
    found = parse("float32+nvfp4, conventional+fp16sr,float32,fp8,conventional,fp32")
    assert [p.name for p in found] == ["conventional", "float32+nvfp4", "conventional+fp16sr", "float32", "fp8"]
    kinds = ["exact", "read rounded", "rounded every token", "exact", "rounded every window"]
    assert [p.kind for p in found] == kinds
    assert [p.format for p in found] == ["fp32", "nvfp4", "fp16sr", "fp32", "fp8"]
    assert found[0] == REFERENCE
    assert parse(",".join(p.name for p in parse(DEFAULT))) == parse(DEFAULT)


@pytest.mark.parametrize(
    "name", ["nvfp5", "conventional+nvfp4+fp8", "conventionalfp8", "float32+", "fp64", "conventional+float32+fp8"]
)
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ReplayError, match=r"conventional.FORMAT.*float32.FORMAT.*bf16, fp16, fp8, .*nvfp4"):
        parse(name)


def test_half_octaves() -> None:
    bins = Bins(256)
    assert bins.edges == [16, 23, 32, 45, 64, 91, 128, 181, 256]
    assert bins.positions[-1] == round((181 * 256) ** 0.5)
    assert bins.of(14, 25, CPU).tolist() == [8, 8, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    sums = Sums(bins, 1, CPU)
    values = torch.arange(512.0).view(1, 2, 256)
    for start in (0, 100):
        sums.add(values[:, :, start : start + 100 if start == 0 else None], start)
    assert sums.per_bin()[0, -1] == values[0, :, 181:].sum()
    assert sums.total()[0] == values.sum()


def test_slopes_and_ratios() -> None:
    positions = [2**i for i in range(4, 12)]
    assert fit(positions, [p**0.7 for p in positions], 64) == (pytest.approx(0.7), pytest.approx(0, abs=1e-9))
    assert fit(positions, [0.0] * 8, 64) == (None, None)

    def row(kind: str, kl: float, form: str = "nvfp4") -> dict[str, Any]:
        return {"model": "m", "format": form, "kind": kind, "kl": [1.0, kl]}

    every, once = "rounded every token", "rounded every window"
    found = comparisons([row(every, 0.3), row(every, 0.2, "nvfp4sr"), row(once, 0.1), row("read rounded", 0.05)])
    assert found == [
        {
            "model": "m",
            "format": "nvfp4",
            "read": 0.05,
            "rounded every token": pytest.approx(6),
            "rounded every token, sr": pytest.approx(4),
            "rounded every window": pytest.approx(2),
        }
    ]


def test_step_tokens() -> None:
    assert [step_tokens(window) for window in (1, 6, 16, 20, 32, 48, 64)] == [1, 3, 8, 10, 16, 16, 16]


@pytest.mark.parametrize("preset", ["nvfp4", "fp16sr", "float32+fp8"])
@pytest.mark.parametrize("name", ["gdn", "mamba2", "kda"])
def test_steps_of_several_tokens_are_plain_decoding(name: str, preset: str) -> None:
    """They find the same checkpoint and copy at every token, and leave the same behind, whatever it is rounded to.

    With written values in float32: tokens of one step take each other's before they are stored.
    """
    sizes = {"heads": 2, "groups": 1, "head_dim": 16, "state_dim": 16, "dtype": torch.float32}
    policy = replace(Precision.preset(preset), buffer="fp32")
    plain = Layout(CORNERS[name], window=8, precision=policy, **sizes)
    several = Layout(CORNERS[name], window=8, max_draft=4, precision=policy, **sizes)
    one, other = (ReplayCache.allocate(layout, 1, 1, seed=3) for layout in (plain, several))
    inputs = random_inputs(name, plain, 32, generator(7))
    out = []
    for token in range(32):
        out.append(step(one[0], take(inputs, [token]), Rows.decode([0])))
        one.commit(Rows.decode([0]), [1])
    for start in range(0, 32, 4):
        got = step(other[0], take(inputs, range(start, start + 4)), Rows.draft([0], [4]))
        torch.testing.assert_close(got, torch.cat(out[start : start + 4]), rtol=1e-5, atol=1e-5)
        other.commit(Rows.draft([0], [4]), [4])
        assert int(other.length[0]) == (start + 4) % 8
    assert int(one.folds[0]) == int(other.folds[0]) == 4
    torch.testing.assert_close(other.materialise(0, [0]), one.materialise(0, [0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last", [None, 5, 700])
def test_attention_looks_back_so_far(last: int | None) -> None:
    source = generator(1)
    query, key, value = (torch.randn(2, n, t, 8, generator=source) for n, t in ((4, 600), (2, 640), (2, 640)))
    got, _ = attend(None, query, key, value, None, scaling=0.3, last=last)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    here, there = torch.arange(40, 640)[:, None], torch.arange(640)
    seen = (there <= here) & (here - there < (last or 640))
    wanted = F.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)
    with pytest.raises(ReplayError, match="softcap"):
        attend(None, query, key, value, None, softcap=30.0)


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "kimi_linear", "mamba2"])
def test_the_reference_is_the_stock_model(name: str) -> None:
    """Chunks, the loop, attention and positions together give what the model gives for the whole text at once."""
    transformers = pytest.importorskip("transformers")
    from replayssm.drift.measure import Drift

    known = json.loads((Path(__file__).parents[1] / "data" / "tiny_configs.json").read_text())["supported"]
    if name not in known or name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"no tiny {name}")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**known[name]["config"])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(2, 128, (2, 97), generator=generator(2))
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    before = model.config._attn_implementation
    drift = Drift(model, parse("float32,conventional+fp8,float32+fp8"), 96, 2, window=8, chunk=40).run(ids)
    assert model.config._attn_implementation == before
    nll = drift.nll.total() / (2 * 96)
    torch.testing.assert_close(nll[:2], wanted.double().expand(2), rtol=1e-6, atol=1e-6)
    assert drift.kl.total()[1] / 192 < 1e-10
    assert drift.kl.total()[2] > drift.kl.total()[3] > 0
    for wrong, truth in drift.errors.values():
        error = (wrong.total() / truth.total()).sqrt()
        assert error[:2].max() < 1e-5
        assert 10 * error[:2].max() < error[3] < error[2]
