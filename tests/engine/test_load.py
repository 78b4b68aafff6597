"""A part of ``benchmarks/load.py``: requests come, go, are cancelled and preempted; texts stay right, nothing leaks."""

import sys
from pathlib import Path

import pytest
from engine_tiny import tiny
from transformers_tiny import VOCABULARY, noisy, prompt

from replayssm.engine import DraftModel, MtpDrafter, MtpHead, PromptLookup, SuffixLookup

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from load import Mixture, cases, run


def heads(name):
    """Of the models that have one: untrained, and asked for drafts all the same."""
    return [MtpDrafter(MtpHead(tiny(name)[0]).eval(), branches=(2, 1), cost=0.01)] if name == "qwen3_next" else []


@pytest.mark.parametrize(("name", "requests"), [("nemotron_h", 120), ("qwen3_next", 60), ("kimi_linear", 60)])
def test_load(name, requests):
    model, _ = tiny(name)
    texts = [prompt(1, 40, seed=seed)[0].tolist() for seed in range(6)]
    texts[0] = texts[0][:5] * 8
    assert max(map(max, texts)) < VOCABULARY
    models = DraftModel(noisy(model, 0.05)), DraftModel(tiny("llama")[0], branches=(2, 1))
    drafters = Mixture([PromptLookup(), *models, SuffixLookup(least=1), PromptLookup(branches=2), *heads(name)])
    work = cases(texts, requests, seed=1, longest=36, most=12)
    report = run(
        model, drafters, work, 1, slots=4, max_length=64, chunk=8, window=8, prefix_memory=400_000, max_draft=6
    )
    assert report.wrong == []
    assert report.left == []
    assert min(report.cancelled, report.preemptions, report.reused, report.accepted) > 2
    assert report.drafted > report.accepted
