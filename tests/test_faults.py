"""Faults that were reported against other implementations, each with the right value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replayssm import Layout, LinearInputs, ReplayCache, Rows, step
from replayssm.reference import gates, token_loop
from support.caches import decode, started
from support.makers import CORNERS, DELTA, generator, layout_of, random_inputs, random_state, take
from support.model import Model, conv_layout
from support.poison import changed, live_parts, poison, same

corners = pytest.mark.parametrize("name", CORNERS)


def model_of(name: str, **changes: int) -> Model:
    """Four loaded slots of a layout with a convolution."""
    model = Model(name, conv_layout(layout_of(name, **changes)))
    model.load(range(4))
    return model


@corners
def test_zero_draft_step_after_accepts(name: str) -> None:
    """A step without drafts after several accepted ones reads the newest state, not an older column."""
    model = model_of(name)
    for counts, accepted in (([4, 4], [3, 4]), ([1, 1], [1, 1]), ([0, 3], [0, 2]), ([1, 0], [1, 0]), ([4, 1], [4, 1])):
        model.step([2, 1], counts)
        model.commit(accepted)
        model.check()


@corners
def test_two_rejections_in_a_row(name: str) -> None:
    """A rollback happens once: the second rejection starts from the same place as the first."""
    model = model_of(name)
    model.step([0], [3])
    model.commit([2])
    alive = live_parts(model.cache, [0])
    for _ in range(3):
        model.step([0], [4])
        model.commit([0])
        assert changed(alive, live_parts(model.cache, [0])) == []
    model.step([0], [4])
    model.commit([1])
    model.check()


@corners
def test_batch_level_ragged_predicate(name: str) -> None:
    """Rows with 0, 1 and 4 tokens in one call, near and far from the end of the window: each by its own counts."""
    model = model_of(name)
    for turn in range(12):
        counts = [(turn * 3 + r * 2) % 5 for r in range(4)]
        model.step([3, 1, 0, 2], counts, extra=turn % 3)
        model.commit([max(0, n - (turn + r) % 3) for r, n in enumerate(counts)])
        model.check()
    assert len(set(model.cache.length.tolist())) > 1


@corners
@pytest.mark.parametrize("window", [4, 9])
def test_one_token_final_prompt_chunk(name: str, window: int) -> None:
    """A prompt's last chunk of one token is a step right after load, whatever the slot held before."""
    model = model_of(name, window=window)
    model.step([1], [4])
    model.commit([4])
    model.step([1, 0], [3, 2])
    model.load([1], phase=5)
    model.commit([0, 2])
    model.step([1], [1])
    model.commit([1])
    model.check()
    model.step([1, 0], [1, 4])
    model.commit([1, 4])
    model.check()


@corners
def test_stale_or_nan_slot_reuse(name: str) -> None:
    """A slot that held NaN everywhere is clean after load, reset, fork and import."""
    model = model_of(name)

    def bring() -> None:
        model.cache.import_([2], model.cache.export([0]))
        model.truth[2] = model.truth[0].copy()

    ways = (lambda: model.load([2]), lambda: model.reset([2]), lambda: model.fork([0], [2]), bring)
    for turn, renew in enumerate(ways):
        model.step([0, 2], [3, 2])
        model.commit([2, 1])
        for tensors in model.cache.views():
            for tensor in tensors.values():
                tensor[2] = float("nan")
        renew()
        model.check()
        model.step([2, 0], [4, turn])
        model.commit([3, turn])
        model.check()


@corners
def test_a_neighbour_full_of_nan(name: str) -> None:
    """NaN in a slot that is in no row, and in a row of the same batch, stays there."""
    model = model_of(name)
    clean = [0, 2, 3]
    for tensors in model.cache.views():
        for tensor in tensors.values():
            tensor[1] = float("nan")
    for turn in range(4):
        layout = model.layout
        inputs = random_inputs(name, layout, 7, generator(turn))
        rows = Rows.draft([0, 1, 2], [2, 3, 2])
        out = step(model.cache[0], inputs, rows)
        assert torch.isfinite(out[[0, 1, 5, 6]]).all()
        model.cache.commit(rows, [0, 0, 0])
    states = model.cache.materialise(0, clean)
    assert torch.isfinite(states).all()


@corners
def test_unaligned_multi_request_prefill(name: str) -> None:
    """States of prompts of different lengths, loaded in one call in any slot order, continue their own prompt."""
    layout = layout_of(name)
    lengths = [7, 16, 1, 33]
    prompts = [random_inputs(name, layout, n, generator(n)) for n in lengths]
    zero = torch.zeros(layout.heads, layout.head_dim, layout.state_dim, dtype=torch.float64)
    states = torch.stack([token_loop(layout, prompt, zero)[1][-1] for prompt in prompts])
    cache = ReplayCache.allocate(layout, 1, 5)
    slots = [3, 0, 4, 1]
    cache.load(0, slots, states, phase=lengths)
    assert same(cache.materialise(0, slots), states)
    for t in range(8):
        inputs = random_inputs(name, layout, 4, generator(100 + t))
        out = step(cache[0], inputs, Rows.decode(slots))
        cache.commit(Rows.decode(slots), [1] * 4)
        for r in range(4):
            want, after = token_loop(layout, take(inputs, [r]), states[r])
            torch.testing.assert_close(out[r], want[0], rtol=1e-10, atol=1e-10)
            states[r] = after[0]
    torch.testing.assert_close(cache.materialise(0, slots), states, rtol=1e-10, atol=1e-10)


@corners
@pytest.mark.parametrize("draft", [1, 3])
def test_prompt_an_exact_multiple_of_the_window(name: str, draft: int) -> None:
    """Prompts of one, two and three windows, fed by steps, and one token less and more."""
    layout = layout_of(name, window=6, max_draft=draft)
    for length in (5, 6, 7, 12, 18):
        model = Model(name, layout, slots=1)
        model.load([0])
        for start in range(0, length, draft):
            count = min(draft, length - start)
            model.step([0], [count])
            model.commit([count])
        model.check()
        model.step([0], [1])


@corners
def test_state_equals_after_fold(name: str) -> None:
    """The state, not only the outputs, over many folds at different times."""
    model = model_of(name)
    model.load(range(4), phase=[0, 1, 2, 3])
    for turn in range(30):
        model.step(range(4), [1 + (turn + r) % 4 for r in range(4)])
        model.commit([1 + (turn + r) % (1 + (turn + r) % 4) for r in range(4)])
        model.check()
        if turn % 7 == 0:
            model.fold([turn % 4])
    assert min(model.cache.folds.tolist()) > 5


@pytest.mark.parametrize("name", DELTA)
def test_4096_token_free_running_drift(name: str) -> None:
    """Outputs fed back as values: no worse than the float32 recurrence, against float64."""
    tokens, heads = 4096, 16
    layout = layout_of(name, torch.float32, heads=heads, groups=heads, head_dim=8, state_dim=8, window=16, max_draft=1)
    lowered = gates(random_inputs(name, layout, tokens, generator(1), decay=0.05), layout, torch.float32)
    cache = ReplayCache.allocate(layout, 1, 1)
    shape = (heads, layout.head_dim, layout.state_dim)
    states = {torch.float64: torch.zeros(shape).double(), torch.float32: torch.zeros(shape)}
    outputs: dict[str, Tensor] = {key: torch.zeros(heads, 8).double() for key in ("exact", "loop", "replay")}
    squares = {"loop": 0.0, "replay": 0.0, "scale": 0.0}
    rows = Rows.decode([0])

    def feed(t: int, last: Tensor) -> LinearInputs:
        q, k, v, g, beta = (None if x is None else x[t : t + 1] for x in lowered)
        assert q is not None
        assert k is not None
        assert v is not None
        return LinearInputs(q, k, (v + 0.5 * last).to(torch.float32), g, beta)

    for t in range(tokens):
        outputs["replay"] = step(cache[0], feed(t, outputs["replay"]), rows)[0].double()
        cache.commit(rows, [1])
        for key, dtype in (("exact", torch.float64), ("loop", torch.float32)):
            out, after = token_loop(layout, feed(t, outputs[key]), states[dtype], dtype=dtype)
            states[dtype], outputs[key] = after[0], out[0].double()
        for key in ("loop", "replay"):
            squares[key] += float((outputs[key] - outputs["exact"]).square().mean())
        squares["scale"] += float(outputs["exact"].square().mean())
    error, conventional, scale = (((squares[key]) / tokens) ** 0.5 for key in ("replay", "loop", "scale"))
    assert 1e-3 < scale < 1e2
    assert 0 < error <= 1.1 * conventional + 1e-7 * scale


def far_apart(layout: Layout, slots: int, stride: int) -> list[dict[str, Tensor]]:
    """Views whose slots lie ``stride`` elements apart in memory that is hardly touched."""
    found = {}
    for name, spec in layout.tensors.items():
        steps = [1]
        for size in reversed(spec.shape[1:]):
            steps.insert(0, steps[0] * size)
        numel = (slots - 1) * stride + steps[0] * spec.shape[0]
        found[name] = torch.empty(numel, dtype=spec.dtype).as_strided((slots, *spec.shape), (stride, *steps))
        found[name].zero_()
    return [found]


@corners
@pytest.mark.parametrize("backend", ["", "torch"])
def test_64_bit_slot_offsets(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot begins past 2^31 elements."""
    monkeypatch.setenv("REPLAYSSM_CPU", backend)
    layout = layout_of(name, torch.float32)
    try:
        views = far_apart(layout, 3, 2**30 + 1)
    except RuntimeError:
        pytest.skip("no room for sparse memory of this size")
    assert all(view.stride(0) * 2 > 2**31 for view in views[0].values())
    far, near = ReplayCache.over(layout, views), ReplayCache.allocate(layout, 1, 3)
    for cache in (far, near):
        cache.load(0, range(3), random_state(layout, 3, generator(1)))
        for turn in range(6):
            rows = Rows.draft([2, 0, 1], [3, 1, turn % 4])
            step(cache[0], random_inputs(name, layout, 4 + turn % 4, generator(turn)), rows)
            cache.commit(rows, [2, 1, turn % 4])
        cache.fork([2, 0], [1, 2])
        poison(cache)
    assert all(same(far.views()[0][key], near.views()[0][key]) for key in layout.tensors)
    assert same(far.materialise(0, range(3)), near.materialise(0, range(3)))


@corners
def test_empty_batch(name: str) -> None:
    """No rows, rows without tokens, only padding: outputs are zero or empty and nothing changes."""
    layout = layout_of(name)
    cache = started(layout)
    decode(cache, name, 2)
    alive = live_parts(cache, range(4))
    for rows, tokens in (
        (Rows.decode([]), 0),
        (Rows.decode([]), 3),
        (Rows.draft([1, 2], [0, 0]), 0),
        (Rows.decode([-1]), 1),
    ):
        out = step(cache[0], random_inputs(name, layout, tokens, generator(1)), rows)
        assert out.shape == (tokens, layout.heads, layout.head_dim)
        assert not out.any()
        cache.commit(rows, [0] * len(rows.slots))
    shape = (0, layout.heads, layout.head_dim, layout.state_dim)
    cache.load(0, [], torch.zeros(shape, dtype=torch.float64))
    cache.fold([])
    cache.reset([])
    cache.fork([], [])
    cache.import_([], cache.export([]))
    assert cache.materialise(0, []).shape == shape
    assert cache.length.tolist() == [2, 2, 2, 2]
    assert changed(alive, live_parts(cache, range(4))) == []
