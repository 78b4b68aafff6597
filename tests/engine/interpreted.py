"""The engine's way on a GPU, without one: tables, kernels of attention and of the recurrent layers, interpreted."""

from __future__ import annotations

import pytest
import torch
from engine_tiny import Oracle, engine, lengthy, prompts, texts, tiny
from transformers_tiny import prompt, whole

import support.interpreting  # noqa: F401
from replayssm.engine import Params, PromptLookup
from replayssm.engine.packed import Row
from replayssm.engine.runner import Runner, settings_of


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "falcon_h1"])
def test_ragged_rows_and_trees(name: str) -> None:
    model = tiny(name)[0]
    runner = Runner(model, 3, None, 48, settings_of(8, 4, None))
    assert runner.stepper is not None
    try:
        texts = [prompt(1, 40, seed=seed)[0].tolist() for seed in range(3)]
        done = [0, 0, 0]
        tree = [-1, 0, 0, 2]  # tokens 0, 2, 3 are the text, token 1 is a wrong branch
        for counts in ((9, 1, 4), (1, 3, 2), (2, 2, 4), (1, 1, 1)):
            for pair in runner.keys.layers.values():
                for tensor in pair:
                    for slot, length in enumerate(runner.lengths):
                        tensor[slot, :, length:] = torch.nan
            rows, paths = [], []
            for slot in (2, 0, 1):
                tokens = texts[slot][done[slot] : done[slot] + counts[slot]]
                if counts[slot] == 4:
                    rows.append(Row(slot, [tokens[0], 7, tokens[1], tokens[2]], tree, wanted=4))
                    paths.append([0, 2, 3])
                else:
                    keep = len(tokens) if len(tokens) > 4 else max(1, len(tokens) - 1)
                    rows.append(Row(slot, tokens, wanted=len(tokens)))
                    paths.append(list(range(keep)))
            logits = runner.forward(rows)
            runner.commit([len(path) for path in paths], paths)
            for row, part, path in zip(rows, logits.split([row.wanted for row in rows]), paths, strict=True):
                start = done[row.slot]
                wanted = whole(model, torch.tensor([texts[row.slot][: start + row.count]]))[0, start:]
                if row.parents:
                    part, wanted = part[[0, 2, 3]], wanted[:3]
                torch.testing.assert_close(part, wanted, rtol=1e-4, atol=3e-5)
                done[row.slot] += len(path)
            assert runner.lengths == done
        for pool in runner.pools:
            pool.check()
    finally:
        runner.close()


@pytest.mark.parametrize("branching", [False, True])
def test_speculation_says_what_the_model_says(branching: bool) -> None:
    model, wanted = tiny()
    drafter = Oracle({tuple(p): w for p, w in zip(prompts(), wanted, strict=True)}, branching)
    with engine(model, drafter=drafter, max_draft=4) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted
        assert served.counters.accepted > 0


def test_plain_decode_and_samples() -> None:
    model, wanted = tiny("nemotron_h")
    with engine(model) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted
    with engine(model) as one, engine(tiny("qwen3_next")[0], drafter=PromptLookup(), max_draft=3) as other:
        params = Params(max_tokens=6, temperature=0.9, top_p=0.9, seed=3, n=2, logprobs=2)
        for served in (one, other):
            request = served.generate([prompts()[2]], params)[0]
            assert [len(sample.tokens) for sample in request.samples] == [6, 6]
            assert all(entry.value <= 0 for sample in request.samples for entry in sample.logprobs)
