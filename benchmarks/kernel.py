"""Time of one layer's decode on this GPU: replay step, commit and folds over full cycles, against the usual step.

    PYTHONPATH=src:benchmarks python benchmarks/kernel.py --out results.jsonl [--case NAME …] [--sweep]

Everything is a CUDA graph. A replayed graph holds a full cycle of model steps (every layer's step, one commit with its
fold), with the rows' folds staggered, over more data than the L2 holds. ``replayssm bench kernel`` calls this module.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from conventional import conventional_step
from replayssm import (
    GDN,
    KDA,
    MAMBA2,
    GdnInputs,
    KdaInputs,
    Layout,
    Mamba2Inputs,
    Precision,
    Recurrence,
    ReplayCache,
    Rows,
    step,
)
from replayssm.backends.triton.launch import Tile
from replayssm.inputs import Inputs

DEVICE = "cuda"
# State of all layers together: several times the L2 of the GPUs at hand.
LEAST_BYTES = 400 << 20


@dataclass(frozen=True)
class Size:
    """The sizes of a published model's layer."""

    recurrence: Recurrence
    heads: int
    groups: int
    head_dim: int
    state_dim: int


SHAPES = {
    "mamba2-128x64x128": Size(MAMBA2, 128, 8, 64, 128),  # Nemotron-3 Super
    "mamba2-96x80x128": Size(MAMBA2, 96, 8, 80, 128),  # Nemotron-3 Nano 4B
    "gdn-64x128x128": Size(GDN, 64, 16, 128, 128),  # Qwen3.5-122B
    "kda-64x128x128": Size(KDA, 64, 64, 128, 128),  # GLM-5 Next
    "kda-32x128x128": Size(KDA, 32, 32, 128, 128),  # Kimi Linear 48B
}


@dataclass(frozen=True)
class Case:
    """One figure: a shape, a batch, a window, drafts a step and how many of them are accepted, a precision."""

    shape: str
    batch: int
    window: int = 16
    draft: int = 1
    accepted: int = 1
    checkpoint: str = "fp32"
    rounding: str = "nearest"
    buffer: str | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.shape}/b{self.batch}/t{self.draft}/w{self.window}/{self.checkpoint}"

    @property
    def layout(self) -> Layout:
        """The layout of the case, bfloat16 activations."""
        size = SHAPES[self.shape]
        policy = Precision(self.checkpoint, buffer=self.buffer, rounding=self.rounding)  # type: ignore[arg-type]
        return Layout(
            *(size.recurrence, size.heads, size.groups, size.head_dim, size.state_dim),
            window=self.window,
            max_draft=self.draft,
            precision=policy,
        )

    @property
    def layers(self) -> int:
        """Enough layers that their states do not fit into the L2."""
        size = self.layout.tensors["checkpoint"].nbytes * self.batch
        return max(1, -(-LEAST_BYTES // size))


def random_inputs(layout: Layout, tokens: int, seed: int = 0) -> Inputs:
    """Inputs of a decode step with the gates' usual ranges."""
    source = torch.Generator(DEVICE).manual_seed(seed)
    h, g, p, k, n = layout.heads, layout.groups, layout.head_dim, layout.state_dim, tokens

    def rand(*shape: int, dtype: torch.dtype = layout.dtype) -> Tensor:
        return torch.randn(*shape, generator=source, device=DEVICE).to(dtype)

    wide = torch.float32
    rate = torch.rand(h, generator=source, device=DEVICE) * 4 + 0.5
    if layout.recurrence == MAMBA2:
        bias = torch.rand(h, generator=source, device=DEVICE) * 3 - 5
        return Mamba2Inputs(rand(n, h, p), rand(n, h), rand(n, g, k), rand(n, g, k), -rate, bias)
    q, key, v = rand(n, g, k), rand(n, g, k), rand(n, h, p)
    if layout.recurrence == GDN:
        return GdnInputs(q, key, v, rand(n, h), rand(n, h), rate.log(), rand(h, dtype=wide) - 3)
    return KdaInputs(q, key, v, rand(n, h, k), rand(n, h), rate.log(), rand(h, k, dtype=wide) - 3)


class Replay:
    """A cache in its steady state and the model step on it."""

    def __init__(self, case: Case, tiles: dict[str, Tile] | None = None, layers: int | None = None) -> None:
        layout = self.layout = case.layout
        self.case = case
        self.layers = layers or case.layers
        self.cache = ReplayCache.allocate(layout, self.layers, case.batch, DEVICE)
        assert self.cache.verbs is not None
        self.cache.verbs.tiles.update(tiles or {})
        slots = torch.arange(case.batch, dtype=torch.int32, device=DEVICE)
        self.rows = Rows.draft(slots, torch.full_like(slots, case.draft))
        self.accepted = torch.full_like(slots, case.accepted)
        for view in self.cache.views():
            view["checkpoint"].normal_()
        # Spread the first folds evenly over the cycle, in an order that is no order of the slots.
        phase = (torch.randperm(case.batch) * self.period // case.batch * case.accepted).to(torch.int32).to(DEVICE)
        self.cache._limit.sub_(phase).clamp_(min=0)
        self.inputs = [random_inputs(layout, case.batch * case.draft, layer) for layer in range(min(self.layers, 8))]

    @property
    def period(self) -> int:
        """Model steps from fold to fold of a row."""
        return self.layout.room // self.case.accepted + 1

    def steps(self) -> None:
        """Every layer's step."""
        for layer in range(self.layers):
            step(self.cache[layer], self.inputs[layer % len(self.inputs)], self.rows)

    def model_step(self) -> None:
        """Every layer's step, and the commit with its fold."""
        self.steps()
        self.cache.commit(self.rows, self.accepted)

    def cycle(self) -> None:
        """A full cycle: as many folds as rows."""
        for _ in range(self.period):
            self.model_step()


def graph(work: Callable[[], Any], warm: int = 1) -> torch.cuda.CUDAGraph:
    """Capture ``work`` after running it ``warm`` times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    return captured


def replay_times(captured: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Milliseconds of each of ``times`` replays."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        captured.replay()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def ceilings() -> dict[str, float]:
    """Bytes a second that this GPU reads, and copies (read plus written), in TB/s."""
    x = torch.empty(1 << 28, dtype=torch.float32, device=DEVICE).normal_()
    y = torch.empty_like(x)
    copy = statistics.median(replay_times(graph(lambda: y.copy_(x)), 5))
    read = statistics.median(replay_times(graph(lambda: torch.sum(x.view(4096, -1), 1)), 5))
    return {"copy_tb_s": 2 * x.nbytes / copy / 1e9, "read_tb_s": x.nbytes / read / 1e9}


def measure_replay(case: Case, tiles: dict[str, Tile] | None = None, budget_ms: float = 150.0) -> dict[str, float]:
    """Milliseconds a layer and token step: mean over full cycles, and the parts."""
    replay = Replay(case, tiles)
    whole = graph(replay.cycle, warm=2)
    first = replay_times(whole, 1)[0]
    times = max(3, min(20, int(budget_ms / max(first, 0.01))))
    count = case.layers * replay.period
    cycle = statistics.median(replay_times(whole, times)) / count
    single = graph(replay.model_step)
    spread = replay_times(single, 3 * replay.period)
    by_phase = [statistics.median(spread[i :: replay.period]) for i in range(replay.period)]
    replay.cache.commit(replay.rows, torch.zeros_like(replay.accepted))
    only = (
        statistics.median(replay_times(graph(replay.steps), max(3, min(20, int(20 / max(first, 0.01)))))) / case.layers
    )
    replay.cache.check()
    state = case.layout.tensors["checkpoint"].nbytes * case.batch
    return {
        "ms": cycle,
        "ms_step": only,
        "slowest_over_mean": max(by_phase) / statistics.mean(by_phase),
        "state_gb_s": state / cycle / 1e6,
        "period": replay.period,
        "layers": case.layers,
    }


CONVENTIONAL_TILES = [Tile(p, 128, w) for p, w in ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8))]


def measure_conventional(case: Case, tiles: list[Tile] | None = None) -> dict[str, Any]:
    """Milliseconds a layer of the conventional one-token step, with the best of several tiles."""
    layout = replace(case.layout, max_draft=1, precision=Precision())
    slots = torch.arange(case.batch, dtype=torch.int32, device=DEVICE)
    shape = layout.tensors["checkpoint"].shape
    states = torch.empty((case.layers, case.batch, *shape), device=DEVICE).normal_()
    inputs = random_inputs(layout, case.batch)
    out = torch.empty((case.batch, *shape[:2]), dtype=layout.dtype, device=DEVICE)
    found = []
    for tile in tiles or CONVENTIONAL_TILES:
        tile = replace(tile, k=triton.next_power_of_2(layout.state_dim))

        def work(tile: Tile = tile) -> None:
            for state in states:
                conventional_step(state, slots, inputs, layout, out, tile)

        captured = graph(work)
        first = replay_times(captured, 1)[0]
        times = replay_times(captured, max(3, min(20, int(30 / max(first, 0.01)))))
        found.append((statistics.median(times) / case.layers, [tile.p, tile.warps]))
    best = min(found)
    return {"ms_conventional": best[0], "conventional_tile": best[1]}


def accuracy(case: Case) -> dict[str, float]:
    """Relative error of the state after three windows, against the float64 recurrence; and of the float32 one."""
    small = replace(case, batch=2)
    layout, layers = small.layout, 1
    plain = replace(layout, max_draft=1, precision=Precision())
    cache = ReplayCache.allocate(layout, layers, 2, DEVICE)
    slots = torch.arange(2, dtype=torch.int32, device=DEVICE)
    truth = torch.zeros((2, *layout.tensors["checkpoint"].shape), dtype=torch.float64, device=DEVICE)
    single = truth.float()
    tile = Tile(16, triton.next_power_of_2(layout.state_dim), 2)
    rows = Rows.draft(slots, torch.full_like(slots, small.draft))
    out = torch.empty((2, layout.heads, layout.head_dim), dtype=layout.dtype, device=DEVICE)
    for number in range(3 * layout.window // small.accepted):
        inputs = random_inputs(layout, 2 * small.draft, 100 + number)
        step(cache[0], inputs, rows)
        for t in range(small.accepted):
            part = _tokens(inputs, torch.arange(2, device=DEVICE) * small.draft + t)
            conventional_step(truth, slots, part, plain, out, tile, torch.float64)
            conventional_step(single, slots, part, plain, out, tile)
        cache.commit(rows, torch.full_like(slots, small.accepted))
    got = cache.materialise(0, slots.cpu()).double()
    norm = truth.norm().item()
    return {
        "error": (got - truth).norm().item() / norm,
        "error_conventional": (single.double() - truth).norm().item() / norm,
    }


def _tokens(inputs: Inputs, index: Tensor) -> Inputs:
    names = [name for name in inputs.__dataclass_fields__ if name not in ("A", "A_log", "dt_bias")]  # type: ignore
    picked = {n: v[index] if isinstance(v := getattr(inputs, n), Tensor) else v for n in names}
    return replace(inputs, **picked)  # type: ignore[type-var]


def provenance(commit: str) -> dict[str, Any]:
    """Where a row was measured."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
    }


def default_cases() -> list[Case]:
    """The cases of the table in docs/benchmarks."""
    found = []
    for shape in SHAPES:
        window = 16 if shape.startswith("kda") else 32
        found += [Case(shape, b, window) for b in (256, 64, 16, 1)]
        found += [Case(shape, b, 32, 4, 3) for b in (64, 256)]
        found += [Case(shape, b, 48, 8, 5) for b in (64, 256)]
        found += [Case(shape, 256, window, checkpoint="fp16", rounding="stochastic")]
    return found


def decode_tiles(layout: Layout) -> Iterator[Tile]:
    """Tiles of the step that are worth measuring."""
    columns = triton.next_power_of_2(layout.state_dim)
    if layout.max_draft > 1:
        for p, warps, registers in ((64, 4, 0), (64, 8, 0), (32, 4, 168)):
            yield Tile(p, columns, warps, 16, registers, 1)
        return
    found = [Tile(64, 32, 4, programs, registers) for programs, registers in ((16, 0), (16, 168), (16, 128), (64, 128))]
    found += [Tile(64, 32, 4, 16, 168, 3), Tile(32, 32, 2, 16, 128)]
    if layout.head_dim % 64:
        found = [Tile(16, 32, 1, 16), Tile(16, 64, 2, 16), Tile(32, 32, 2, 16, 128)]
    for tile in found:
        yield replace(tile, k=min(tile.k, columns))


def fold_tiles(layout: Layout) -> Iterator[Tile]:
    """Tiles of the fold that are worth measuring."""
    columns = triton.next_power_of_2(layout.state_dim)
    if layout.max_draft == 1:
        yield Tile(64 if layout.head_dim % 64 == 0 else 16, columns, 4, 2)
        yield Tile(32, columns, 4, 4, 128)
        yield Tile(32, columns, 4, 3, 168)


def _compile(job: tuple[Case, dict[str, Tile], int]) -> str:
    """Run one model step on a small batch, so that the kernels are in Triton's cache on disk."""
    case, tiles, layers = job
    try:
        if "conventional" in tiles:
            measure_conventional(replace(case, batch=16), [tiles["conventional"]])
            return ""
        replay = Replay(replace(case, batch=16), tiles, layers)
        replay.model_step()
        torch.cuda.synchronize()
        return ""
    except Exception as problem:
        return f"{tiles}: {type(problem).__name__} {str(problem)[:200]}"


def precompile(cases: list[Case], workers: int = 12) -> None:
    """Compile all tiles of a sweep in parallel processes."""
    from multiprocessing import get_context

    jobs = [
        (case, {kernel: tile}, case.layers)
        for case in cases
        for kernel, tiles in (("step", decode_tiles(case.layout)), ("fold", fold_tiles(case.layout)))
        for tile in tiles
    ]
    jobs += [(case, {"conventional": t}, 1) for case in cases if case.draft == 1 for t in CONVENTIONAL_TILES]
    with get_context("spawn").Pool(workers) as pool:
        for problem in pool.imap_unordered(_compile, jobs):
            if problem:
                print("  compile", problem, flush=True)


def sweep(case: Case, write: Callable[[dict[str, Any]], None]) -> dict[str, Tile]:
    """Time every tile of the step, then of the fold; return the best of each."""
    best: dict[str, Tile] = {}
    for kernel, tiles in (("step", decode_tiles(case.layout)), ("fold", fold_tiles(case.layout))):
        found = []
        for tile in tiles:
            try:
                row = measure_replay(case, {**best, kernel: tile}, budget_ms=60)
            except Exception as problem:  # a tile that does not fit this GPU is one that is not chosen
                print(f"  {kernel} {tile}: {type(problem).__name__} {str(problem)[:80]}", flush=True)
                continue
            key = "ms_step" if kernel == "step" else "ms"
            found.append((row[key], tile))
            write({"sweep": kernel, **asdict(case), "tile": list(asdict(tile).values()), **row})
            torch.cuda.empty_cache()
        if found:
            best[kernel] = min(found, key=lambda item: item[0])[1]
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--case", nargs="*", default=None, help="parts of a case's name")
    parser.add_argument("--sweep", nargs="*", default=[], help="shapes whose tiles are swept first")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after so many")
    args = parser.parse_args()
    started = time.time()
    where = provenance(args.commit)

    def write(row: dict[str, Any]) -> None:
        with args.out.open("a") as file:
            file.write(json.dumps({**row, **where}) + "\n")

    chosen = [case for part in args.case or [""] for case in default_cases() if part in case.name]
    if args.sweep:
        firsts = {(case.shape, case.draft): case for case in reversed(chosen) if case.shape in args.sweep}
        precompile(list(firsts.values()))
        print(f"compiled in {time.time() - started:.0f} s", flush=True)
    if args.compile_only:
        return
    ceiling = ceilings()
    write(ceiling)
    print(ceiling, flush=True)
    conventional: dict[tuple[str, int], dict[str, Any]] = {}
    best: dict[tuple[str, int], dict[str, Tile]] = {}
    accurate: dict[tuple[str, int, str], dict[str, float]] = {}
    for case in chosen:
        if time.time() - started > args.seconds:
            print("out of time at", case.name)
            break
        try:
            key = (case.shape, case.batch)
            if key not in conventional:
                conventional[key] = measure_conventional(case)
            kind = (case.shape, case.draft)
            if case.shape in args.sweep and kind not in best:
                best[kind] = {**best.get((case.shape, 1), {}), **sweep(case, write)}
            tiles = best.get(kind, {})
            errors = accurate.setdefault((case.shape, case.draft, case.checkpoint), {}) or accuracy(case)
            accurate[case.shape, case.draft, case.checkpoint] = errors
            row = {**measure_replay(case, tiles), **conventional[key], **errors}
            row["ratio"] = row["ms_conventional"] / row["ms"]
            write({**asdict(case), **row, "tiles": {n: list(asdict(t).values()) for n, t in tiles.items()}})
            print(
                f"{case.name:42s} {row['ms']:.4f} ms, step {row['ms_step']:.4f}, "
                f"conventional {row['ms_conventional']:.4f} ({row['ratio']:.2f}x), "
                f"slowest/mean {row['slowest_over_mean']:.2f}, error {row['error']:.1e} "
                f"({row['error_conventional']:.1e})",
                flush=True,
            )
        except Exception as problem:
            print(f"{case.name}: {type(problem).__name__} {str(problem)[:300]}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
