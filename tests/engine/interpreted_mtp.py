"""The multi-token-prediction head on the way of a GPU, interpreted: the same drafts as on the CPU's way."""

from __future__ import annotations

import interpreted  # noqa: F401  (the interpreter's patch)
import pytest
import torch
from engine_tiny import engine, lengthy, prompts, texts, tiny
from test_mtp import Recording, head_of, naive

import support.interpreting  # noqa: F401


@pytest.mark.parametrize("branches", [(1,), (2, 1)], ids=["chain", "tree"])
def test_drafts(branches: tuple[int, ...]) -> None:
    model, wanted = tiny("qwen3_5_text")
    drafter = Recording(head_of(model), branches, cost=0.01)
    ids, params = [prompts()[1], prompts()[2]], lengthy()[:2]
    with engine(model, drafter=drafter, max_draft=4) as served:
        assert served.runner.stepper is not None
        assert drafter._runner is not None
        assert drafter._runner.stepper is not None
        for pair in drafter._runner.keys.layers.values():
            for tensor in pair:
                tensor.fill_(torch.nan)
        assert texts(served.generate(ids, params)) == [wanted[1][:8], wanted[2][:9]]
    assert len(drafter.kept) > 5
    for tokens, depth, draft in drafter.kept:
        first = naive(model, drafter.head, tokens, depth if branches == (1,) else 1)
        assert draft.tokens[: len(first)] == first
