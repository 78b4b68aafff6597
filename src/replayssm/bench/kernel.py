"""One figure: a case's full cycles, its parts, the conventional step beside it, its bytes and its errors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from replayssm.bench.cases import Case
from replayssm.bench.conventional import Conventional
from replayssm.bench.replay import Replay, moved
from replayssm.bench.timing import Setup, free, median, prepare
from replayssm.plan.traffic import state_bytes

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile

Row = dict[str, Any]


def measure_replay(case: Case, setup: Setup, tiles: Mapping[str, Tile] | None = None) -> Row:
    """Milliseconds a layer and model step.

    Returns:
        ``ms``: mean over full cycles with staggered folds, commit and folds inside; ``ms_step``: the step alone;
        ``by_step``: each model step of a cycle with staggered folds; ``aligned``: the same with all rows folding
        together at its end; ``slowest_over_mean`` of the staggered ones; ``ms_fold``: a fold of all rows, just before
        they fold by themselves; ``period``, ``layers``, ``bytes``.
    """
    replay = Replay(case, setup, tiles)
    whole, period = prepare(replay.cycle, setup.device, warm=2), replay.period
    first = whole(1)[0]
    count = replay.layers * period
    cycle = statistics.median(whole(setup.repetitions(first))) / count
    single = prepare(replay.model_step, setup.device)
    by_step = _positions(single(3 * period), period, replay.layers)
    replay.drop()
    only = prepare(replay.steps, setup.device)
    step = statistics.median(only(setup.repetitions(first / period))) / replay.layers
    replay.align()
    aligned = _positions(single(3 * period), period, replay.layers)
    fold = _fold(replay, setup)
    replay.cache.check()
    return {
        "ms": cycle,
        "ms_step": step,
        "slowest_over_mean": max(by_step) / statistics.mean(by_step),
        "by_step": by_step,
        "aligned": aligned,
        "ms_fold": fold,
        "period": period,
        "layers": replay.layers,
        "bytes": round(moved(case).total),
    }


def _fold(replay: Replay, setup: Setup) -> float:
    """Milliseconds that a fold of all rows takes a layer, right after they folded together."""
    for _ in range(replay.period - 1):
        replay.model_step()
    entries = replay.cache.length.clone()

    def fold() -> None:
        replay.cache.length.copy_(entries)
        replay.cache.fold(replay.rows.slots)

    return median(setup, fold) / replay.layers


def _positions(times: list[float], period: int, layers: int) -> list[float]:
    """The median of each position in a cycle, a layer."""
    return [round(statistics.median(times[i::period]) / layers, 6) for i in range(period)]


def measure_conventional(case: Case, setup: Setup, knobs: tuple[int, int]) -> Row:
    """Milliseconds a layer of the conventional one-token step."""
    usual = Conventional(case, setup, knobs)
    times = prepare(usual.model_step, setup.device)
    found = statistics.median(times(setup.repetitions(times(1)[0]))) / usual.layers
    return {"ms_conventional": found, "conventional_tile": list(knobs)}


def figure(case: Case, setup: Setup, ceiling: Row, knobs: tuple[int, int], tiles: Mapping[str, Tile]) -> Row:
    """A case's row, but for its errors and its origin; ``knobs`` are the conventional tile's."""
    usual = measure_conventional(case, setup, knobs)
    free()
    row = {**asdict(case), **measure_replay(case, setup, tiles), **usual, **ceiling}
    row["ratio"] = row["ms_conventional"] / row["ms"]
    copied = 2 * state_bytes(case.layout) * case.batch
    row["fold_over_copy"] = row["ms_fold"] / (copied / row["copy_tb_s"] / 1e9)
    row["read_share"] = row["bytes"] / row["ms"] / 1e9 / row["read_tb_s"]
    row["tiles"] = {name: list(asdict(tile).values()) for name, tile in tiles.items()}
    free()
    return row
