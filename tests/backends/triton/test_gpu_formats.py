"""State formats on a CUDA device: the checks that the interpreter runs, and larger walks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from format_checks import NAMES, PRESETS, check_round_trip, check_walk, small, written

from replayssm import Layout, Precision, ReplayCache, Rows, step
from support.makers import CORNERS, generator, layout_of, put, random_inputs, random_state, take
from support.poison import same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, stochastic: bool) -> None:
    for state_dim in (64, 24, 72, 128):
        check_round_trip(name, state_dim, stochastic, DEVICE)


def pair(layout: Layout) -> tuple[ReplayCache, ReplayCache]:
    """A cache of the kernels, and one of the host."""
    return tuple(ReplayCache.allocate(layout, 1, 3, device, seed=9) for device in (DEVICE, "cpu"))  # type: ignore[return-value]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", CORNERS)
def test_walk(name: str, preset: str) -> None:
    policy = Precision.preset(preset)
    check_walk(name, policy, pair(small(name, policy)), steps=9)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", CORNERS)
def test_verify(name: str, preset: str) -> None:
    policy = Precision.preset(preset)
    check_walk(name, policy, pair(small(name, policy, window=8, max_draft=4)), steps=5)


@pytest.mark.parametrize("draft", [1, 4])
@pytest.mark.parametrize("buffer", ["fp16", "bf16", "bf16x2", "fp16_scaled"])
@pytest.mark.parametrize("name", ["gdn", "kda", "deltanet"])
def test_written_values(name: str, buffer: str, draft: int) -> None:
    policy = written(buffer)
    check_walk(name, policy, pair(small(name, policy, window=8, max_draft=draft)), steps=5)


@pytest.mark.parametrize("sizes", [(64, 128), (128, 128), (256, 64), (80, 96)], ids=str)
@pytest.mark.parametrize("preset", ["float32+fp8", "float32+nvfp4", "fp16sr+nvfp4", "int8sr", "nvfp4"])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_sizes_of_models(name: str, preset: str, sizes: tuple[int, int]) -> None:
    policy = Precision.preset(preset)
    p, k = sizes
    check_walk(name, policy, pair(small(name, policy, heads=4, groups=2, head_dim=p, state_dim=k, window=16)), steps=20)


@pytest.mark.parametrize("preset", ["float32+fp8", "float32+nvfp4", "nvfp4sr", "int8"])
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_a_row_does_not_depend_on_its_batch(name: str, preset: str) -> None:
    """I9, folds included: alone in another slot, the same bits."""
    sizes = {"heads": 4, "groups": 2, "head_dim": 64, "state_dim": 128, "window": 6, "max_draft": 1}
    layout = layout_of(name, torch.bfloat16, precision=Precision.preset(preset), **sizes)
    state = random_state(layout, 9, generator(0)).to(DEVICE)
    results = []
    for order, slots in (([4], [1]), ([7, 4, 0, 1, 8], [0, 6, 3, 2, 5])):
        cache, source = ReplayCache.allocate(layout, 1, 8, DEVICE, seed=3), generator(1)
        cache.load(0, slots, state[order])
        outs = []
        for _ in range(14):
            inputs = put(take(random_inputs(name, layout, 1, source), [0] * len(slots)), DEVICE)
            rows = Rows.decode(torch.tensor(slots, dtype=torch.int32, device=DEVICE))
            outs.append(step(cache[0], inputs, rows)[order.index(4)])
            cache.commit(rows, torch.ones(len(slots), dtype=torch.int32, device=DEVICE))
        cache.check()
        results.append((torch.stack(outs), cache.materialise(0, [slots[order.index(4)]])))
    assert same(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("copy", [name for name in NAMES if name != "fp32"])
@pytest.mark.parametrize("checkpoint", ["float32", "fp16sr"])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_a_copy_never_feeds_the_recurrence(name: str, checkpoint: str, copy: str) -> None:
    """I6: the checkpoint of a run with a copy is that of the run without, bit for bit."""
    sizes = {"heads": 4, "groups": 2, "head_dim": 128, "state_dim": 128, "window": 6, "max_draft": 1}
    kept = []
    for preset in (checkpoint, f"{checkpoint}+{copy}"):
        layout, source = layout_of(name, torch.bfloat16, precision=Precision.preset(preset), **sizes), generator(2)
        cache = ReplayCache.allocate(layout, 1, 2, DEVICE, seed=3)
        cache.load(0, [0, 1], random_state(layout, 2, source).to(DEVICE))
        rows = Rows.decode(torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
        for _ in range(20):
            step(cache[0], put(random_inputs(name, layout, 2, source), DEVICE), rows)
            cache.commit(rows, torch.ones(2, dtype=torch.int32, device=DEVICE))
        cache.check()
        kept.append(cache.views()[0]["checkpoint"])
    assert same(*kept)
