"""Replay against a conventional step on the CPU, both compiled, on a state larger than the caches, in one run.

    python benchmarks/cpu_step.py --recurrence gdn --gib 1

Both sides do the same decode, one token a row: the conventional step reads and rewrites the float32 state; replay reads
the checkpoint or its read copy, appends, commits and folds. A run covers whole windows, folds included, with staggered
phases, so that each step carries its share of them. The two are timed in turns, because the machine's speed drifts,
and both states are on large pages.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, GdnInputs, KdaInputs, Layout, Mamba2Inputs, Precision, ReplayCache, Rows, step
from replayssm.backends.cpu import large_pages
from replayssm.inputs import Inputs

SHAPES = {
    "mamba2": Layout(MAMBA2, 128, 8, 64, 128),
    "gdn": Layout(GDN, 64, 16, 128, 128),
    "kda": Layout(KDA, 64, 64, 128, 128),
}


CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}


def random_inputs(layout: Layout, tokens: int) -> Inputs:
    """Fresh inputs of a decode step with moderate decay."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(layout.dtype)

    h, g, p, k = layout.heads, layout.groups, layout.head_dim, layout.state_dim
    if layout.recurrence == MAMBA2:
        key, query = draw(tokens, g, k), draw(tokens, g, k)
        return Mamba2Inputs(draw(tokens, h, p), draw(tokens, h), key, query, -torch.rand(h), torch.randn(h))
    q, key, v, b = draw(tokens, g, k), draw(tokens, g, k), draw(tokens, h, p), draw(tokens, h)
    if layout.recurrence == GDN:
        return GdnInputs(q, key, v, draw(tokens, h), b, torch.randn(h) - 2, torch.randn(h))
    return KdaInputs(q, key, v, draw(tokens, h, k), b, torch.randn(h) - 2, torch.randn(h, k))


def conventional(layout: Layout) -> Callable[[Tensor, Inputs], Tensor]:
    """A compiled step that reads and rewrites the whole state [R, H, P, K] float32 for each token."""

    def run(state: Tensor, inputs: Inputs) -> Tensor:
        low = inputs.lower(layout)
        repeat = layout.heads // layout.groups
        q = low.q.repeat_interleave(repeat, 1)[:, :, None]
        key = low.k.float() if low.key_scale is None else low.k.float() * low.key_scale[..., None]
        key = key.repeat_interleave(repeat, 1)[:, :, None]
        assert low.g is not None
        decay = low.g.exp()
        state.mul_(decay[:, :, None] if decay.ndim == 3 else decay[..., None, None])
        value = low.v.float()
        if layout.recurrence.update == "delta":
            value = value - (state * key).sum(-1)
        state.add_((low.beta[..., None] * value)[..., None] * key)
        return (state * q).sum(-1).to(layout.dtype)

    return torch.compile(run)


def measure(
    name: str, gib: float, window: int, cycles: int, precision: str, clock: Callable[[], float]
) -> dict[str, object]:
    """Time both sides over ``cycles`` windows; medians in ms per step."""
    layout = replace(SHAPES[name], window=window, precision=Precision.preset(precision))
    state_bytes = prod(layout.state_shape) * 4
    rows_n = max(1, int(gib * 2**30 / state_bytes))
    state = large_pages(torch.empty(rows_n, *layout.state_shape)).normal_().mul_(0.1)
    cache = ReplayCache.allocate(layout, layers=1, slots=rows_n)
    cache.load(0, range(rows_n), state, phase=range(rows_n))
    rows, ones = Rows.decode(range(rows_n)), [1] * rows_n
    baseline = conventional(layout)
    times: dict[str, list[float]] = {"conventional": [], "step": [], "commit": []}
    worst = scale = 0.0
    for number in range((1 + cycles) * window):
        inputs = random_inputs(layout, rows_n)
        start = clock()
        expected = baseline(state, inputs)
        middle = clock()
        out = step(cache[0], inputs, rows)
        stepped = clock()
        cache.commit(rows, ones)
        end = clock()
        worst = max(worst, float((out.float() - expected.float()).abs().max()))
        scale = max(scale, float(expected.float().abs().max()))
        if number >= window:  # the first window compiles
            for key, value in zip(times, (middle - start, stepped - middle, end - stepped), strict=True):
                times[key].append(value * 1e3)
    median = {key: statistics.median(values) for key, values in times.items()}
    replay = [s + c for s, c in zip(times["step"], times["commit"], strict=True)]
    return {
        "recurrence": name,
        "precision": precision,
        "gib": round(rows_n * state_bytes / 2**30, 3),
        "rows": rows_n,
        "window": window,
        "steps": len(replay),
        "folds": int(cache.folds.sum()),
        "conventional_ms": median["conventional"],
        "step_ms": median["step"],
        "commit_ms": median["commit"],
        "replay_ms": statistics.median(replay),
        "ratio": statistics.median(r / c for r, c in zip(replay, times["conventional"], strict=True)),
        "ratio_of_means": statistics.fmean(replay) / statistics.fmean(times["conventional"]),
        "worst_difference": worst,
        "output_scale": scale,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrence", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of float32 state")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--precision", default="float32", help="of replay: a preset such as float32+int8")
    parser.add_argument("--threads", type=int, help="for both sides (default: torch's choice)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="thread: this thread's CPU time, for one thread on a busy machine",
    )
    parser.add_argument("--cycles", type=int, default=2, help="timed windows, after one that compiles")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.clock == "thread" and torch.get_num_threads() > 1:
        parser.error("--clock thread needs --threads 1")
    for name in SHAPES if arguments.recurrence == "all" else [arguments.recurrence]:
        row = measure(
            name, arguments.gib, arguments.window, arguments.cycles, arguments.precision, CLOCKS[arguments.clock]
        )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
