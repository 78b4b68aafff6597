"""The public API on a CUDA device against the float64 oracle, and what only a device can show."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from replayssm import GDN, KDA, MAMBA2, Conv, Layout, Precision, ReplayCache, ReplayError, Rows, precision, step
from support.makers import CORNERS, EVERY, generator, layout_of, put, random_inputs, random_state, take
from support.model import Model, conv_layout
from support.poison import changed, live_parts, picture, poison, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def tree(count: int, source: random.Random) -> list[int]:
    return [source.randrange(-1, t) if t else -1 for t in range(count)]


def walk(model: Model, steps: int, seed: int, trees: bool = True) -> None:
    """Random steps, commits, folds, forks and resets; every output and state is compared."""
    source, most = random.Random(seed), model.layout.max_draft
    model.load(range(model.slots), phase=[source.randrange(9) for _ in range(model.slots)])
    for number in range(steps):
        slots = source.sample(range(model.slots), source.randint(1, model.slots))
        slots.insert(source.randint(0, len(slots)), -1)
        counts = [source.randint(0, most) for _ in slots]
        if trees and number % 2:
            parents = [parent for count in counts for parent in tree(count, source)]
            model.step(slots, counts, parents)
            model.again()
            model.commit([], [-1 if s < 0 else source.randint(-1, c - 1) for s, c in zip(slots, counts, strict=True)])
        else:
            model.step(slots, counts)
            model.commit([source.randint(0, c) for c in counts])
        model.cache.check()
        verb = source.choice(["fold", "fork", "reset", "", "", ""])
        if verb == "fork":
            model.fork([0, 1], [1, 2])
        elif verb:
            getattr(model, verb)([source.randrange(model.slots)])
        model.check()


@pytest.mark.parametrize("dtype", [FULL, BRAIN, HALF], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_walk(name: str, dtype: torch.dtype) -> None:
    layout = conv_layout(layout_of(name, dtype, heads=4, groups=2, head_dim=16, state_dim=32))
    walk(Model(name, layout, layers=2, slots=5, device=DEVICE), 6, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 32, "groups": 1, "head_dim": 64, "state_dim": 128, "window": 16, "max_draft": 1},
        {"heads": 2, "groups": 2, "head_dim": 80, "state_dim": 128, "window": 33, "max_draft": 1},
        {"heads": 3, "groups": 1, "head_dim": 192, "state_dim": 96, "window": 24, "max_draft": 16},
        {"heads": 2, "groups": 1, "head_dim": 128, "state_dim": 256, "window": 64, "max_draft": 1},
        {"heads": 2, "groups": 2, "head_dim": 256, "state_dim": 64, "window": 20, "max_draft": 8},
        {"heads": 2, "groups": 1, "head_dim": 32, "state_dim": 16, "window": 8, "max_draft": 1},
        {"heads": 4, "groups": 1, "head_dim": 128, "state_dim": 128, "window": 48, "max_draft": 8},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_sizes(name: str, sizes: dict[str, int]) -> None:
    walk(Model(name, layout_of(name, BRAIN, **sizes), layers=1, slots=3, device=DEVICE), 3, 2, trees=False)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_many_plain_steps(name: str) -> None:
    model = Model(name, layout_of(name, BRAIN, head_dim=64, state_dim=64, window=7, max_draft=1), 2, 3, DEVICE)
    model.load([0, 1, 2], phase=[0, 3, 5])
    for _ in range(20):
        model.step([2, -1, 0, 1], [1, 1, 1, 1])
        model.commit([1, 0, 1, 1])
    model.check()


def pair(name: str, draft: int, **changes: object) -> Layout:
    return layout_of(name, BRAIN, heads=4, groups=2, head_dim=64, state_dim=128, window=12, max_draft=draft, **changes)


@pytest.mark.parametrize("draft", [1, 5])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_a_row_does_not_depend_on_its_batch(name: str, draft: int) -> None:
    """I9: alone, and as one of 37 shuffled rows with padding in another slot: the same bits."""
    layout, source = pair(name, draft), generator(3)
    tokens = [random_inputs(name, layout, 37 * draft, source) for _ in range(14)]
    state = random_state(layout, 37, source)

    def run(order: list[int], slots: list[int], padding: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        cache = ReplayCache.allocate(layout, 1, 64, DEVICE)
        cache.load(0, slots, state[order].to(DEVICE))
        places = [slots.index(s) for s in slots]
        names = torch.tensor([-1] * padding + slots, dtype=torch.int32, device=DEVICE)
        outs = []
        for part in tokens:
            index = [0] * (padding * draft) + [order[p] * draft + t for p in places for t in range(draft)]
            rows = Rows.draft(names, torch.full_like(names, draft))
            out = step(cache[0], put(take(part, index), DEVICE), rows)
            outs.append(out[padding * draft :].view(len(slots), draft, *out.shape[1:])[order.index(5)].clone())
            cache.commit(rows, torch.full_like(names, max(1, draft - 2)))
        cache.check()
        return outs, cache.materialise(0, [slots[order.index(5)]])

    alone, state_alone = run([5], [9], 0)
    order = list(range(37))
    random.Random(0).shuffle(order)
    among, state_among = run(order, [63 - i for i in range(37)], 3)
    assert all(same(a, b) for a, b in zip(alone, among, strict=True))
    assert same(state_alone, state_among)


@pytest.mark.parametrize("draft", [1, 4])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_graph_replay_equals_eager(name: str, draft: int) -> None:
    """A whole model step, folds and stochastic rounding inside, captured once and replayed over several windows."""
    policy = Precision(checkpoint=HALF, rounding="stochastic")
    layout, source = pair(name, draft, precision=policy), generator(4)
    layout = replace(layout, conv=Conv(16))
    inputs = [put(random_inputs(name, layout, 3 * draft, source), DEVICE) for _ in range(2)]
    state = random_state(layout, 3, source).to(DEVICE)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    rows = Rows.draft(slots, torch.full_like(slots, draft))
    taken = torch.full_like(slots, draft)
    x, taps = torch.randn(3 * draft, 16, device=DEVICE).to(BRAIN), torch.randn(16, 4, device=DEVICE).to(BRAIN)
    from replayssm import conv_step

    def model_step(cache: ReplayCache) -> list[torch.Tensor]:
        outs = [conv_step(cache[i], x, taps, None, rows) for i in range(2)]
        outs += [step(cache[i], inputs[i], rows) for i in range(2)]
        cache.commit(rows, taken)
        return outs

    caches = [ReplayCache.allocate(layout, 2, 4, DEVICE, seed=7) for _ in range(2)]
    for cache in caches:
        model_step(cache)  # compiles, and takes what capture must not
        for layer in range(2):
            cache.load(layer, [0, 1, 2], state)
            cache.load_conv(layer, [0, 1, 2], torch.zeros(3, 16, 3, dtype=BRAIN, device=DEVICE))
        poison(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = picture(caches[1])
    with torch.cuda.graph(graph):
        captured = model_step(caches[1])
    assert not changed(before, picture(caches[1]))
    for _ in range(30):
        eager = model_step(caches[0])
        graph.replay()
        assert all(same(a, b) for a, b in zip(eager, captured, strict=True))
    caches[1].check()
    left, right = (live_parts(cache, [0, 1, 2]) for cache in caches)
    assert not changed(left, right)
    assert int(caches[0].folds[0]) >= 2


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_rounding_takes_the_bits_of_the_counter(dtype: torch.dtype) -> None:
    """The fold rounds as ``precision.store`` does, bit for bit."""
    policy = Precision(checkpoint=dtype, rounding="stochastic")
    layout, source = pair("gdn", 1, precision=policy), generator(5)
    cache = ReplayCache.allocate(layout, 2, 3, DEVICE, seed=11)
    for layer in range(2):
        cache.load(layer, [0, 1, 2], random_state(layout, 3, source).to(DEVICE))
    for number in range(1, 4):
        for _ in range(5):
            rows = Rows.decode(torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE))
            for layer in range(2):
                step(cache[layer], put(random_inputs("gdn", layout, 3, source), DEVICE), rows)
            cache.commit(rows, torch.ones(3, dtype=torch.int32, device=DEVICE))
        wanted = [cache.materialise(layer, [0, 1, 2]) for layer in range(2)]
        cache.fold([0, 1, 2])
        counter = torch.full((3,), number, device=DEVICE)
        for layer in range(2):
            rounded = precision.store(wanted[layer], policy, 11, layer, counter)
            assert same(cache.views()[layer]["checkpoint"], rounded)


def test_read_copy_follows_the_checkpoint() -> None:
    """I6, and a checkpoint that does not know of its copy."""
    plain, copied = pair("gdn", 1), pair("gdn", 1, precision=Precision(read_copy=BRAIN))
    caches = [ReplayCache.allocate(layout, 1, 2, DEVICE) for layout in (plain, copied)]
    source = generator(6)
    state = random_state(plain, 2, source).to(DEVICE)
    for cache in caches:
        cache.load(0, [0, 1], state)
    rows = Rows.decode(torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    for _ in range(30):
        inputs = put(random_inputs("gdn", plain, 2, source), DEVICE)
        for cache in caches:
            step(cache[0], inputs, rows)
            cache.commit(rows, [1, 1])
    left, right = (cache.views()[0] for cache in caches)
    assert same(left["checkpoint"], right["checkpoint"])
    assert same(right["read_copy"], right["checkpoint"].to(BRAIN))


def test_views_of_a_packed_projection() -> None:
    layout, source = pair("gdn", 1), generator(7)
    inputs = put(random_inputs("gdn", layout, 3, source), DEVICE)
    flat = [t.flatten(1) for t in (inputs.q, inputs.k, inputs.v)]  # type: ignore[attr-defined]
    packed = torch.cat([*flat, torch.zeros(3, 24, dtype=BRAIN, device=DEVICE)], 1)
    sizes = [t.shape[1] for t in flat] + [24]
    views = [p.view(3, -1, d) for p, d in zip(packed.split(sizes, 1), (128, 128, 64), strict=False)]
    assert not views[0].is_contiguous()
    viewed = replace(inputs, q=views[0], k=views[1], v=views[2])  # type: ignore[type-var]
    outs = []
    for given in (inputs, viewed):
        cache = ReplayCache.allocate(layout, 1, 3, DEVICE)
        cache.load(0, [0, 1, 2], random_state(layout, 3, generator(8)).to(DEVICE))
        outs.append(step(cache[0], given, Rows.decode(torch.arange(3, dtype=torch.int32, device=DEVICE))))
    assert same(*outs)


def test_slots_beyond_32_bits() -> None:
    """An engine's memory with more than 2³¹ elements between slots."""
    layout = pair("gdn", 1)
    far = 2**31 + 64
    views = {}
    memory = torch.empty(far + layout.heads * 64 * 128, device=DEVICE)
    for name, spec in layout.tensors.items():
        views[name] = torch.zeros((2, *spec.shape), dtype=spec.dtype, device=DEVICE)
    shape = layout.tensors["checkpoint"].shape
    views["checkpoint"] = memory.as_strided((2, *shape), (far, shape[1] * shape[2], shape[2], 1))
    near = ReplayCache.allocate(layout, 1, 2, DEVICE)
    distant = ReplayCache.over(layout, [views])
    source = generator(9)
    state = random_state(layout, 2, source).to(DEVICE)
    rows = Rows.decode(torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    for cache in (near, distant):
        cache.load(0, [0, 1], state)
    for _ in range(14):
        inputs = put(random_inputs("gdn", layout, 2, source), DEVICE)
        assert same(*(step(cache[0], inputs, rows) for cache in (near, distant)))
        for cache in (near, distant):
            cache.commit(rows, [1, 1])
    assert same(near.materialise(0, [0, 1]), distant.materialise(0, [0, 1]))


def on_device(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("slots", "counts", "taken", "message"),
    [
        ((0, 9, 1), (1, 1, 1), (1, 1, 1), "slot 9"),
        ((0, 1, 0), (1, 1, 1), (1, 1, 1), "comes twice"),
        ((0, 2, 1), (1, 1, 1), (1, 2, 1), "accepts fewer than 0 or more"),
        ((0, 2, 1), (1, 5, 1), (1, 1, 1), "more than the layout's max_draft"),
    ],
)
def test_values_on_the_device_are_checked_without_waiting(
    slots: tuple[int, ...], counts: tuple[int, ...], taken: tuple[int, ...], message: str
) -> None:
    """I10: the offending row writes nothing, the others go on, and the error is raised at the next read."""
    layout = layout_of("gdn", FULL)
    cache = ReplayCache.allocate(layout, 1, 3, DEVICE)
    cache.load(0, [0, 1, 2], random_state(layout, 3, generator(1)).to(DEVICE))
    before = cache.length.clone()
    rows = Rows.draft(on_device(*slots), on_device(*counts))
    step(cache[0], put(random_inputs("gdn", layout, sum(counts), generator(2)), DEVICE), rows)
    cache.commit(rows, on_device(*taken))
    with pytest.raises(ReplayError, match=message):
        cache.check()
    cache.check()
    assert (cache.length - before).tolist() == [1, 1, 0]


def test_the_host_sees_shapes_at_once() -> None:
    layout = layout_of("gdn", FULL)
    cache = ReplayCache.allocate(layout, 1, 3, DEVICE)
    with pytest.raises(ReplayError, match="max_draft"):
        ReplayCache.allocate(replace(layout, max_draft=17, window=40), 1, 1, DEVICE)
    with pytest.raises(ReplayError, match="on cuda"):
        step(cache[0], random_inputs("gdn", layout, 1, generator(2)), Rows.decode(on_device(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_drift(name: str) -> None:
    """131,072 teacher-forced tokens: the error stays within 1.1 × that of the conventional float32 recurrence."""
    benchmarks = pytest.importorskip("layer_drift", reason="run with PYTHONPATH=src:benchmarks")
    found = benchmarks.drift(CORNERS[name], tokens=131072)
    assert found["error"] <= 1.1 * found["error_conventional"] + 1e-7, found


assert {MAMBA2, GDN, KDA} <= set(CORNERS.values())
