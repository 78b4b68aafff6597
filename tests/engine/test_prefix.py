"""Beginnings of prompts: the same text with and without reuse, and never more memory than allowed."""

import pytest
import torch
from engine_tiny import engine, tiny
from transformers_tiny import prompt

from replayssm import Precision
from replayssm.engine import Params


def branching_prompts():
    """Beginnings of 16, 8 and 0 common tokens, whole blocks and rests of every size."""
    base = prompt(1, 30, seed=5)[0].tolist()
    ends = [prompt(1, n, seed=n)[0].tolist() for n in (1, 7, 8, 3, 16)]
    return [base[:16], base[:17], base[:16] + ends[1], base[:8] + ends[4], ends[2], ends[2] + ends[3], base, base[:24]]


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "kimi_linear", "falcon_h1"])
def test_reuse_changes_no_text(name):
    model, _ = tiny(name)
    params = [Params(max_tokens=7, logprobs=0), Params(max_tokens=7, temperature=1.0, seed=3, logprobs=0)]
    asked, runs = branching_prompts(), []
    for memory in (0, 1 << 30):
        with engine(model, prefix_memory=memory, max_length=48) as served:
            runs.append([served.generate(ids, each)[0] for each in params for ids in asked])
            reused = served.scheduler.reused
            assert (reused > 100) == bool(memory)
            assert served.counters.prompt == 2 * sum(map(len, asked)) - reused
            assert served.prefix.blocks == (6 if memory else 0)  # three of base, two after its first, one alone
    for plain, again in zip(*runs, strict=True):
        assert plain.tokens == again.tokens
        values = [[entry.value for entry in request.samples[0].logprobs] for request in (plain, again)]
        torch.testing.assert_close(*map(torch.tensor, values), rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["fp32", "fp16sr", "fp32+nvfp4", "int8sr"])
@pytest.mark.parametrize("name", ["mamba2", "kimi_linear"])
def test_reuse_is_exact_in_every_precision(name, policy):
    """States are rounded where the request's own folds fall, whoever computed its beginning."""
    model, _ = tiny(name)
    params, runs = Params(max_tokens=20, logprobs=0), []
    for memory in (0, 1 << 30):
        options = {"prefix_memory": memory, "precision": Precision.preset(policy)}
        with engine(model, **options) as served:
            found = [served.generate(ids, params)[0].samples[0] for ids in branching_prompts()]
            assert (served.scheduler.reused > 50) == bool(memory)
        runs.append([[entry.value for entry in sample.logprobs] for sample in found])
    assert runs[0] == runs[1]


def test_memory_is_bounded_and_the_oldest_goes():
    model, _ = tiny()
    asked = [prompt(1, 25, seed=seed)[0].tolist() for seed in range(6)]
    with engine(model, prefix_memory=1 << 30) as served:
        served.generate(asked[0], Params(max_tokens=1))
        size = served.prefix.bytes
        assert served.prefix.blocks == 3
    with engine(model, prefix_memory=2 * size + size // 2) as served:
        for ids in asked:
            served.generate(ids, Params(max_tokens=1))
            assert served.prefix.bytes <= served.prefix.limit
            held = sum(part.bytes for each in asked for part in served.prefix.find(each))
            assert held == served.prefix.bytes
        assert len(served.prefix.find(asked[-1])) == 3
        assert not served.prefix.find(asked[0])
        served.prefix.clear()
        assert (served.prefix.bytes, served.prefix.find(asked[-1])) == (0, [])
    with engine(model, prefix_memory=10) as served:
        served.generate(asked[0], Params(max_tokens=1))
        assert served.prefix.blocks == 0
