"""The engine on a CUDA device says what the model says alone on the CPU: graphs, drafters, padding, memory."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from engine_tiny import SERVED, Oracle, boxed, lengthy, prompts, solo, texts, tiny
from transformers_tiny import prompt

from replayssm import Precision, ReplayError
from replayssm.engine import DraftModel, Engine, Params, PromptLookup, SuffixLookup
from replayssm.engine.packed import Row
from replayssm.engine.runner import Runner, settings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW = 40


@cache
def box():
    """The shipped model on the device in float32, prompts of several lengths, and what it says alone on the CPU."""
    model, tokenizer, held = boxed()
    lines = [tokenizer(text)["input_ids"] for text in held[:6]]
    asked = [ids[: 20 + 23 * i] for i, ids in enumerate(lines)]
    return copy.deepcopy(model).cuda(), asked, [solo(model, ids, NEW) for ids in asked]


def said(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    return texts(engine.generate(asked, Params(max_tokens=NEW, ignore_eos=True)))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_plain_decode(slots: int, graphs: bool) -> None:
    model, asked, wanted = box()
    with Engine(model, slots=slots, max_length=256, chunk=32, graphs=graphs) as engine:
        assert said(engine, asked) == wanted
        assert said(engine, asked[::-1]) == wanted[::-1]
        blocks = engine.runner.stepper.blocks.values()  # type: ignore[union-attr]
        assert any(block.forward.graph is not None for block in blocks) == graphs
        for pool in engine.runner.pools:
            pool.check()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("who", ["n-gram", "branches", "suffix", "itself", "tree of itself"])
def test_drafters(who: str, graphs: bool) -> None:
    model, asked, wanted = box()
    drafter = {
        "n-gram": lambda: PromptLookup(),
        "branches": lambda: PromptLookup(branches=3),
        "suffix": lambda: SuffixLookup(),
        "itself": lambda: DraftModel(copy.deepcopy(model)),
        "tree of itself": lambda: DraftModel(copy.deepcopy(model), branches=(2, 1)),
    }[who]()
    with Engine(model, slots=4, max_length=256, chunk=32, max_draft=4, drafter=drafter, graphs=graphs) as engine:
        assert said(engine, asked) == wanted
        assert engine.counters.accepted > 0
        for pool in engine.runner.pools:
            pool.check()


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("max_draft", [2, 5, 16])
def test_chains_and_trees_that_err(max_draft: int, branching: bool) -> None:
    model, asked, wanted = box()
    drafter = Oracle({tuple(p): w for p, w in zip(asked, wanted, strict=True)}, branching)
    options = {"window": 32, "max_draft": max_draft, "drafter": drafter}
    with Engine(model, slots=4, max_length=256, chunk=32, **options) as engine:
        assert said(engine, asked) == wanted


def test_a_replayed_graph_gives_what_an_eager_run_gives() -> None:
    model, asked, _ = box()
    found = []
    for graphs in (False, True):
        runner = Runner(model, 4, None, 256, settings_of(16, 4, None), graphs)
        logits = []
        for slot, ids in enumerate(asked[:3]):
            runner.forward([Row(slot, ids)])
            runner.commit([len(ids)])
        for number in range(5):
            rows = [Row(slot, asked[3][number : number + 1 + slot], wanted=1 + slot) for slot in range(3)]
            logits.append(runner.forward(rows).clone())
            runner.commit([1, 2, 1])
        found.append(torch.stack(logits))
        states = [pool.materialise(0, range(3)) for pool in runner.pools]
        found.append(torch.cat([state.flatten() for state in states]))
        runner.close()
    # The library's kernels give the same bits; the products of matrices may take another way in a graph.
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[3], rtol=1e-5, atol=1e-5)


def test_padding_is_inert() -> None:
    """Slots that no row names keep every byte, whatever the padding of the block computes."""
    model, asked, _ = box()
    runner = Runner(model, 8, None, 128, settings_of(16, 4, None))
    for slot in range(8):
        runner.forward([Row(slot, asked[0])])
        runner.commit([len(asked[0])])
    for number in range(3):
        named = [5, 2, 7]
        others = [slot for slot in range(8) if slot not in named]
        before = [{name: t[others].clone() for name, t in v.items()} for pool in runner.pools for v in pool.views()]
        keys = [t[others].clone() for pair in runner.keys.layers.values() for t in pair]
        runner.forward([Row(slot, asked[1][number : number + 2 + (slot == 7)], wanted=1) for slot in named])
        runner.commit([1, 2, 3])
        after = [{name: t[others] for name, t in v.items()} for pool in runner.pools for v in pool.views()]
        for old, new in zip(before, after, strict=True):
            for name in old:
                torch.testing.assert_close(new[name], old[name], rtol=0, atol=0, equal_nan=True)
        for old, new in zip(keys, (t[others] for pair in runner.keys.layers.values() for t in pair), strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    runner.close()


def test_sampling_does_not_depend_on_the_batch_or_on_graphs() -> None:
    model, asked, _ = box()
    params = [Params(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=i, ignore_eos=True) for i in range(6)]
    found = []
    for slots, graphs in ((1, True), (4, True), (4, False)):
        with Engine(model, slots=slots, max_length=256, chunk=32, graphs=graphs) as engine:
            found.append(texts(engine.generate(asked, params)))
    assert found[0] == found[1] == found[2]


def test_samples_penalties_stops_and_logprobs() -> None:
    model, asked, _ = box()
    reference, tokenizer, _ = boxed()
    params = Params(
        max_tokens=16, temperature=0.7, repetition_penalty=1.2, presence_penalty=0.1, n=3, seed=1, logprobs=2
    )
    found = []
    for each, device in ((reference, "cpu"), (model, "cuda")):
        with Engine(each, tokenizer, slots=4, max_length=256, chunk=32) as engine:
            request = engine.generate([asked[2]], params)[0]
            found.append([sample.tokens for sample in request.samples])
            assert next(each.parameters()).device.type == device
            assert all(len(sample.logprobs) == len(sample.tokens) for sample in request.samples)
    assert found[0] == found[1]


def test_cancel_preempt_and_prefix_leave_nothing() -> None:
    model, asked, wanted = box()
    with Engine(model, slots=2, max_length=256, chunk=16, prefix_memory=1 << 28) as engine:
        requests = [engine.submit(ids, Params(max_tokens=NEW, ignore_eos=True)) for ids in asked]
        for number in range(30):
            engine.step()
            if number == 12:
                engine.preempt(requests[0])
            if number == 20:
                engine.cancel(requests[1])
        while not engine.idle:
            engine.step()
        assert requests[1].samples[0].finish == "cancelled"
        assert [r.tokens for i, r in enumerate(requests) if i != 1] == [w for i, w in enumerate(wanted) if i != 1]
        assert said(engine, asked) == wanted
        assert engine.scheduler.reused > 0
        assert sorted(engine.scheduler.free) == [0, 1]


def test_what_does_not_fit_is_refused() -> None:
    model, _, _ = box()
    with pytest.raises(ReplayError, match=r"do not fit into the \d+ free bytes of cuda"):
        Engine(model, slots=10**8)
    with pytest.raises(ReplayError, match="one sequence takes"):
        Engine(model, memory=10)
    with Engine(model, memory=200_000_000, max_length=128) as engine:
        assert engine.runner.slots >= 1
        assert engine.runner.bytes < 220_000_000


@pytest.mark.parametrize("policy", ["fp32+bf16", "bf16sr", "fp16sr"])
def test_precisions(policy: str) -> None:
    """Near the float32 states' logits."""
    model, asked, _ = box()
    found = []
    for precision in (None, Precision.preset(policy)):
        runner = Runner(model, 2, None, 128, settings_of(8, 1, precision))
        runner.forward([Row(0, asked[0])])
        runner.commit([len(asked[0])])
        logits = []
        for token in asked[1][:12]:
            logits.append(runner.forward([Row(0, [token])]).clone())
            runner.commit([1])
        found.append(torch.cat(logits))
        runner.close()
    assert (found[0] - found[1]).abs().max() < 0.05 * found[0].abs().max()


@pytest.mark.parametrize("name", [*SERVED, "llama"])
def test_every_served_type(name: str) -> None:
    """Captured, or refused with the way out; the same text then."""
    model, wanted = tiny(name)
    model = copy.deepcopy(model).cuda()
    options = {"slots": 3, "max_length": 64, "window": 8, "chunk": 8, "drafter": PromptLookup(), "max_draft": 3}
    problem = None
    try:
        with Engine(model, **options) as engine:  # type: ignore[arg-type]
            assert texts(engine.generate(prompts(), lengthy())) == wanted
    except ReplayError as error:
        problem = str(error)
    if problem is not None:
        print(f"{name}: {problem}")
        assert "graphs=False" in problem
        options["drafter"] = PromptLookup()
        with Engine(model, graphs=False, **options) as engine:  # type: ignore[arg-type]
            assert texts(engine.generate(prompts(), lengthy())) == wanted


def test_bfloat16_logits_are_near_the_stock_forward() -> None:
    model = copy.deepcopy(box()[0]).bfloat16()
    text = prompt(1, 40)[0].tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([text], device="cuda"), use_cache=False).logits[0].float()
    runner = Runner(model, 2, None, 64, settings_of(8, 4, None))
    got = [runner.forward([Row(1, text[:16], wanted=16)]).clone()]
    runner.commit([16])
    for at in range(16, 40, 4):
        got.append(runner.forward([Row(1, text[at : at + 4], wanted=4)]).clone())
        runner.commit([4])
    runner.close()
    error = (torch.cat(got).float() - wanted).norm() / wanted.norm()
    assert error < 0.03
