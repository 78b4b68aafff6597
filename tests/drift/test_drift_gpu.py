"""The same measurement on a CUDA device: its kernels, and graphs from the second chunk on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replayssm.drift.policies import DEFAULT, parse
from support.makers import generator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "kimi_linear"])
def test_as_on_the_cpu(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from replayssm.drift.measure import Drift

    known = json.loads((Path(__file__).parents[1] / "data" / "tiny_configs.json").read_text())["supported"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[name](**known[name]["config"])
    ).eval()
    policies = parse(DEFAULT + ",int4,fp8_e5m2sr,nvfp4sr,conventional+int8sr")
    ids = torch.randint(2, 128, (2, 321), generator=generator(4))
    runs = [Drift(model.to(device), policies, 320, 2, chunk=96).run(ids) for device in ("cpu", "cuda")]
    wanted, got = ({place: (a.total() / b.total()).sqrt() for place, (a, b) in run.errors.items()} for run in runs)
    for place, errors in wanted.items():
        # Roundings are the same, but sums differ in their last bits and move some elements to the next code.
        torch.testing.assert_close(got[place][2:], errors[2:], rtol=0.1, atol=1e-6)
        assert got[place][:2].max() < 1e-5
    torch.testing.assert_close(runs[1].nll.total(), runs[0].nll.total(), rtol=1e-4, atol=1e-3)
