"""The cache: what it is made of, staggered folds, forks, memory that somebody else owns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import GDN, Conv, Layout, Precision, ReplayCache, Rows, step
from support.caches import decode, started
from support.makers import CORNERS, EVERY, generator, layout_of, random_inputs, random_state, take
from support.model import Model, conv_layout
from support.poison import changed, live_parts, picture, poison, same

corners = pytest.mark.parametrize("name", CORNERS)


def test_a_new_cache_holds_the_zero_state_and_says_its_size() -> None:
    layout = Layout(GDN, 4, 2, 8, 16, window=8, max_draft=3, conv=Conv(5, 3), precision=Precision(read_copy="bf16"))
    cache = ReplayCache.allocate(layout, layers=3, slots=6)
    assert repr(cache) == "ReplayCache(GDN, layers=3, slots=6, cpu)"
    assert (cache.length.dtype, cache.length.tolist()) == (torch.int32, [0] * 6)
    for layer, tensors in enumerate(cache.views()):
        assert {name: t.shape[1:] for name, t in tensors.items()} == {n: s.shape for n, s in layout.tensors.items()}
        assert not any(tensors[name].any() for name in ("checkpoint", "read_copy", "conv"))
        assert not cache.materialise(layer, range(6)).any()
        assert all(cache[layer].tensors[name] is tensors[name] for name in tensors)
    held = sum(t.nbytes for tensors in cache.views() for t in tensors.values())
    assert held == 18 * layout.slot_bytes
    assert held + 4 * 4 * 6 <= cache.bytes <= held + 8 * 1024


@corners
@pytest.mark.parametrize("draft", [1, 3])
def test_phases_spread_the_first_folds(name: str, draft: int) -> None:
    """Rows that start together fold apart, about R/W a step, and each as its own phase says."""
    window = 12
    model = Model(name, layout_of(name, window=window, max_draft=draft), slots=10)
    slots = list(range(10))
    model.load(slots, phase=slots)
    room = window - draft
    folded: dict[int, int] = {}
    for turn in range(1, window + 1):
        before = model.cache.folds.clone()
        model.step(slots, [1] * 10)
        model.commit([1] * 10)
        for slot in (model.cache.folds > before).nonzero().flatten().tolist():
            folded.setdefault(slot, turn)
    model.check()
    assert folded == {slot: room - slot % (room + 1) + 1 for slot in slots}


def test_phase_of_one_number_belongs_to_every_row() -> None:
    cache = ReplayCache.allocate(layout_of("gdn", window=6, max_draft=1), 1, 4)
    cache.load(0, [0, 1, -1], random_state(cache.layout, 3, generator(0)), phase=4)
    decode(cache, "gdn", 2)
    assert cache.folds.tolist() == [1, 1, 0, 0]


@corners
def test_load_takes_the_layouts_dtypes_and_skips_padding(name: str) -> None:
    layout = layout_of(name, torch.bfloat16, precision=Precision("fp16"))
    cache = ReplayCache.allocate(layout, 1, 3)
    state = random_state(layout, 2, generator(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache.load(0, [-1, 2], state.to(dtype))
        assert same(cache.materialise(0, [2])[0], state[1].to(dtype).to(torch.float16).float())
        assert not cache.materialise(0, [0, -1, 1]).any()


@corners
def test_load_over_a_live_slot(name: str) -> None:
    """What it held, drafts included, is gone; its neighbours are untouched."""
    model = Model(name, conv_layout(layout_of(name)), layers=2)
    model.load(range(4))
    model.step([0, 1], [4, 3])
    neighbours = live_parts(model.cache, [0, 2, 3])
    model.load([1])
    assert changed(neighbours, live_parts(model.cache, [0, 2, 3])) == []
    model.check()
    model.step([1], [2])
    model.commit([2])
    model.check()


@corners
@given(src=st.lists(st.integers(0, 3), min_size=4, max_size=4), dst=st.permutations(range(4)), size=st.integers(0, 4))
@settings(max_examples=15)
def test_fork_as_if_all_at_once(name: str, src: list[int], dst: list[int], size: int) -> None:
    """A beam search's reordering: overlapping, repeated, onto itself."""
    model = Model(name, conv_layout(layout_of(name)), layers=2)
    model.load(range(4), phase=[0, 1, 2, 3])
    model.step(range(4), [4, 3, 2, 1])
    model.commit([3, 3, 0, 1])
    want = live_parts(model.cache, range(4))
    books = [b.clone() for b in (model.cache.length, model.cache.folds, model.cache._limit)]
    model.fork(src[:size], dst[:size])
    model.check()
    got = live_parts(model.cache, range(4))
    origin = {**{s: s for s in range(4)}, **dict(zip(dst[:size], src[:size], strict=True))}
    for key in got:
        layer, slot, tensor = key.split(".")
        assert same(got[key], want[f"{layer}.{origin[int(slot)]}.{tensor}"])
    for before, after in zip(books, (model.cache.length, model.cache.folds, model.cache._limit), strict=True):
        assert torch.equal(after, before[[origin[s] for s in range(4)]])


@corners
def test_reset_is_the_zero_state(name: str) -> None:
    model = Model(name, conv_layout(layout_of(name)), layers=2)
    model.load(range(4), phase=7)
    model.step([0, 2], [3, 2])
    model.reset([2, -1, 1])
    model.check()
    assert model.cache._limit[[1, 2]].tolist() == [model.layout.room] * 2
    model.commit([3, 0])
    model.check()


@corners
def test_over_memory_with_other_strides(name: str) -> None:
    """An engine's pages: slots interleaved with other things, layers in one block."""
    layout = conv_layout(layout_of(name))
    views: list[dict[str, torch.Tensor]] = [{}, {}]
    for key, spec in layout.tensors.items():
        block = torch.zeros(5, 2, 2, *spec.shape, dtype=spec.dtype)
        for layer in range(2):
            views[layer][key] = block[:, layer, 1]
    model = Model(name, layout, 2, slots=5)
    model.cache = ReplayCache.over(layout, views)
    model.load([4, 0, 2])
    for turn in range(6):
        model.step([2, 4, -1], [4, turn % 5, 1])
        model.commit([turn % 5, turn % 5, 0])
        model.check()
    model.fork([4, 2], [2, 4])
    model.check()
    assert all(model.cache.views()[0][key] is views[0][key] for key in views[0])


def test_over_takes_the_checkpoint_as_it_is() -> None:
    layout = layout_of("gdn")
    views = ReplayCache.allocate(layout, 1, 2).views()
    state = random_state(layout, 2, generator(0))
    views[0]["checkpoint"].copy_(state)
    cache = ReplayCache.over(layout, views)
    poison(cache)
    assert same(cache.materialise(0, [1, 0]), state[[1, 0]])


@pytest.mark.parametrize("name", EVERY)
def test_materialise_is_pure_and_ignores_drafts(name: str) -> None:
    cache = started(layout_of(name), layers=2)
    decode(cache, name, 4)
    want = cache.materialise(1, [3, -1, 0])
    assert not want[1].any()
    step(cache[1], random_inputs(name, cache.layout, 3, generator(0)), Rows.draft([3], [3]))
    before = picture(cache)
    assert same(cache.materialise(1, [3, -1, 0]), want)
    assert changed(before, picture(cache)) == []


def test_fold_of_an_empty_buffer_rounds_nothing() -> None:
    layout = layout_of("gdn", torch.float32, precision=Precision("bf16", rounding="stochastic"))
    cache = started(layout)
    decode(cache, "gdn", 3)
    cache.fold([0, 1])
    before = picture(cache)
    cache.fold([0, 1])
    assert changed(before, picture(cache)) == []


@corners
def test_a_path_that_is_the_first_tokens_and_one_that_is_not(name: str) -> None:
    model = Model(name, conv_layout(layout_of(name)), layers=2)
    model.load(range(4))
    model.step([0, 3, 1], [4, 3, 2], [-1, 0, 0, 2, -1, -1, 1, -1, 0])
    model.commit([], [3, 2, 1])
    assert model.cache.length.tolist() == [3, 2, 0, 2]
    model.check()


def test_a_tree_without_a_path_accepts_one_token() -> None:
    model = Model("gdn", layout_of("gdn"))
    model.load(range(4))
    model.step([0, 1], [4, 3], [-1, 0, 0, -1, -1, -1, 0])
    model.commit([1, 0])
    model.check()


def test_inference_mode_and_gradients() -> None:
    """A cache made inside inference mode works outside; inputs may require gradients; nothing is recorded."""
    layout = layout_of("gdn", torch.float32)
    with torch.inference_mode():
        cache = started(layout)
        decode(cache, "gdn", 2)
    inputs = random_inputs("gdn", layout, 4, generator(0))
    inputs.v.requires_grad_()  # type: ignore[attr-defined]
    out = step(cache[0], inputs, Rows.decode(range(4)))
    cache.commit(Rows.decode(range(4)), torch.ones(4, dtype=torch.int64))
    assert not out.requires_grad
    with torch.inference_mode():
        step(cache[0], take(inputs, range(4)), Rows.decode(range(4)))
        cache.commit(Rows.decode(range(4)), [1] * 4)
    assert cache.length.tolist() == [4] * 4
