"""The conventional way with a state for each draft says what replay says: on the host, and interpreted as on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from replayssm import ReplayCache, ReplayError, Rows, conv_step, step
from replayssm.bench.snapshots import SnapshotCache
from support.interpreter import run_interpreted
from support.makers import generator, layout_of, random_inputs, random_state
from support.model import conv_layout

INTERPRETED = bool(os.environ.get("REPLAYSSM_INTERPRET"))
if INTERPRETED:
    import support.interpreting  # noqa: F401


@pytest.mark.parametrize("draft", [1, 3])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_steps_and_commits_as_replay(name: str, draft: int) -> None:
    sizes = {"heads": 4, "groups": 2, "head_dim": 12, "state_dim": 16, "window": 8, "max_draft": draft}
    layout = conv_layout(layout_of(name, torch.float32, **sizes))
    assert layout.conv is not None
    replay, usual = ReplayCache.allocate(layout, 2, 3), SnapshotCache.allocate(layout, 2, 3)
    source = generator(0)
    for layer in range(2):
        state = random_state(layout, 3, source)
        replay.load(layer, range(3), state)
        usual.load(layer, range(3), state)
    slots = torch.arange(3, dtype=torch.int32)
    rows = Rows.draft(slots, torch.full_like(slots, draft))
    weight = torch.randn(layout.conv.channels, layout.conv.width, generator=source)
    for number in range(5):
        taken = [(row + number) % draft + 1 for row in range(3)]
        for layer in range(2):
            inputs = random_inputs(name, layout, 3 * draft, source)
            torch.testing.assert_close(step(usual[layer], inputs, rows), step(replay[layer], inputs, rows))
            x = torch.randn(3 * draft, layout.conv.channels, generator=source)
            mine, other = (conv_step(cache[layer], x, weight, None, rows) for cache in (usual, replay))
            torch.testing.assert_close(mine, other)
        for cache in (usual, replay):
            cache.commit(rows, torch.tensor(taken, dtype=torch.int32))
        torch.testing.assert_close(usual.materialise(1, range(3)), replay.materialise(1, range(3)))
    usual.check()


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_what_it_holds_and_refuses() -> None:
    layout = conv_layout(layout_of("gdn", torch.float32, heads=2, groups=1, head_dim=4, state_dim=8, max_draft=4))
    assert layout.conv is not None
    cache = SnapshotCache.allocate(layout, 3, 2)
    conv = layout.conv.channels * (layout.conv.width - 1 + 4)
    assert cache.slot_bytes == 3 * (4 * 2 * 4 * 8 + conv) * 4
    with pytest.raises(ReplayError, match="all slots at a time"):
        cache.commit(Rows.decode([1]), [1])


@pytest.mark.skipif(INTERPRETED, reason="runs itself")
@pytest.mark.parametrize("select", ["kda-3", pytest.param("not kda-3", marks=pytest.mark.slow)])
def test_the_kernel_of_a_gpu(select: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__), select=select)
