"""One packed forward against the stock model on the whole text, row by row."""

import pytest
import torch
from engine_tiny import SERVED, tiny
from transformers_tiny import assert_same, prompt, whole

from replayssm import Precision, ReplayError
from replayssm.engine.packed import Row
from replayssm.engine.runner import Runner, settings_of


@pytest.fixture
def make():
    made = []

    def runner(name="qwen3_next", **options):
        sizes = {"slots": 4, "memory": None, "max_length": 48, **options}
        settings = settings_of(sizes.pop("window", 8), sizes.pop("max_draft", 4), sizes.pop("precision", None))
        made.append(Runner(tiny(name)[0], sizes["slots"], sizes["memory"], sizes["max_length"], settings))
        return made[-1]

    yield runner
    for each in made:
        each.close()


def poison(runner):
    """What is not the sequences' own may be anything."""
    for pool in runner.pools:
        for tensors in pool.views():
            for name in ("key", "value", "weight", "decay"):
                if name in tensors:
                    entries = tensors[name]
                    dead = torch.arange(entries.shape[2]) >= pool.length[:, None]
                    shape = (entries.shape[0], 1, entries.shape[2], *(1,) * (entries.ndim - 3))
                    entries.masked_fill_(dead.view(shape), torch.nan)
    for pair in runner.keys.layers.values():
        for tensor in pair:
            for slot, length in enumerate(runner.lengths):
                tensor[slot, :, length:] = torch.nan


@pytest.mark.parametrize("name", [*SERVED, "llama"])
def test_ragged_rows_trees_and_parts_of_prompts(make, name):
    model, runner = tiny(name)[0], make(name)
    texts = [prompt(1, 40, seed=seed)[0].tolist() for seed in range(4)]
    done = [0, 0, 0, 0]
    tree = [-1, 0, 0, 2]  # tokens 0, 2, 3 are the text, token 1 is a wrong branch
    for counts in ((9, 1, 4, 5), (3, 2, 12, 1), (1, 10, 3, 4), (2, 1, 1, 6), (4, 3, 1, 1)):
        poison(runner)
        order = [2, 0, 3, 1]
        rows, taken, paths = [], [], []
        for slot in order:
            tokens = texts[slot][done[slot] : done[slot] + counts[slot]]
            if slot == 3 and counts[slot] == 4:
                tokens = [tokens[0], 7, tokens[1], tokens[2]]
                rows.append(Row(slot, tokens, tree, wanted=4))
                paths.append([0, 2, 3])
            else:
                keep = len(tokens) if len(tokens) > 4 else max(1, len(tokens) - 1)
                rows.append(Row(slot, tokens, wanted=len(tokens)))
                paths.append(list(range(keep)))
            taken.append(len(paths[-1]))
        logits = runner.forward(rows)
        runner.commit(taken, paths)
        for row, part, path in zip(rows, logits.split([row.wanted for row in rows]), paths, strict=True):
            start = done[row.slot]
            wanted = whole(model, torch.tensor([texts[row.slot][: start + row.count]]))[0, start:]
            if row.parents:
                part, wanted = part[[0, 2, 3]], wanted[:3]
            assert_same(part, wanted)
            done[row.slot] += len(path)
        assert runner.lengths == done


def test_fork_export_import_reset(make):
    runner = make("falcon_h1")
    text = prompt(1, 30)[0].tolist()
    runner.forward([Row(1, text[:20])])
    runner.commit([20])
    runner.forward([Row(1, text[20:23])])
    runner.commit([3])
    runner.fork(1, 3)
    parts = [runner.export(1)]
    runner.import_(0, parts)
    assert runner.lengths == [23, 23, 0, 23]
    logits = runner.forward([Row(slot, text[23:26], wanted=3) for slot in (0, 1, 3)]).split(3)
    runner.commit([1, 3, 0])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    runner.reset(1)
    assert_same(runner.forward([Row(1, text[:9], wanted=9)]), whole(tiny("falcon_h1")[0], torch.tensor([text[:9]]))[0])
    assert parts[0].bytes > sum(k.nbytes + v.nbytes for k, v in parts[0].keys.values())
    assert runner.bytes >= runner.slots * runner.slot_bytes


@pytest.mark.parametrize("policy", ["fp32+bf16", "fp32+int8", "bf16sr"])
def test_precisions(make, policy):
    """States in other formats: near the float32 ones, and the same after a move to another slot."""
    text = prompt(1, 30)[0].tolist()
    plain = make()
    wanted = plain.forward([Row(0, text[:20])])
    plain.close()
    runner = make(precision=Precision.preset(policy))
    torch.testing.assert_close(runner.forward([Row(0, text[:20])]), wanted, rtol=1e-4, atol=1e-4)
    runner.commit([20])
    runner.import_(2, [runner.export(0)])
    for start in range(20, 28, 2):
        one, two = runner.forward([Row(slot, text[start : start + 2]) for slot in (0, 2)])
        runner.commit([2, 2])
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_too_long(make):
    runner = make()
    with pytest.raises(ReplayError, match="max_length=48"):
        runner.forward([Row(0, list(range(2, 52)))])
    runner.forward([Row(0, list(range(2, 49)))])
    runner.commit([47])
    with pytest.raises(ReplayError, match="max_length=48"):
        runner.forward([Row(0, [5, 6])])
