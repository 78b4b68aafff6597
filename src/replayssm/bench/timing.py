"""Times of repeated work: CUDA graphs between events, or the wall clock on the CPU; and what the memory can do."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Runs the work so many times and returns the milliseconds of each.
Times = Callable[[int], list[float]]


@dataclass(frozen=True)
class Setup:
    """Where and how thoroughly.

    Attributes:
        device: "cuda" or "cpu".
        megabytes: least MiB of all layers' states together: more than the last cache holds.
        least: layers at least. The commit of a model step and its fold are one launch for all of them.
        budget_ms: time that a figure's repetitions may take; three of them are always made.
    """

    device: str
    megabytes: int = 400
    least: int = 1
    budget_ms: float = 150.0

    def repetitions(self, each_ms: float) -> int:
        """How often work that takes ``each_ms`` is repeated."""
        return max(3, min(20, int(self.budget_ms / max(each_ms, 0.01))))

    def layers(self, layer_bytes: int) -> int:
        """Layers whose states of ``layer_bytes`` come to ``megabytes``, ``least`` at least."""
        return max(self.least, -(-(self.megabytes << 20) // layer_bytes))


def prepare(work: Callable[[], object], device: str, warm: int = 1) -> Times:
    """``work`` after ``warm`` runs, ready to be timed: captured in a CUDA graph, or as it is on the CPU."""
    if device == "cuda":
        return _graph_times(graph(work, warm))
    for _ in range(warm):
        work()

    def times(count: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(count):
            work()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    return times


def graph(work: Callable[[], object], warm: int = 1) -> torch.cuda.CUDAGraph:
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


def _graph_times(captured: torch.cuda.CUDAGraph) -> Times:
    def times(count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            captured.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    return times


def median(setup: Setup, work: Callable[[], object], warm: int = 1) -> float:
    """Median milliseconds of ``work``."""
    times = prepare(work, setup.device, warm)
    return statistics.median(times(setup.repetitions(times(1)[0])))


def ceilings(setup: Setup) -> dict[str, float]:
    """Bytes a second that this device reads, and copies (read plus written), in TB/s, both by a kernel."""
    count = 1 << 28 if setup.device == "cuda" else setup.megabytes << 18
    x = torch.randn(count, device=setup.device)
    y = torch.empty_like(x)
    copy = median(setup, lambda: torch.mul(x, 1.0, out=y))
    rows = x.view(-1, min(count, 1 << 16))
    read = median(setup, lambda: torch.sum(rows, 1))
    return {"copy_tb_s": 2 * x.nbytes / copy / 1e9, "read_tb_s": x.nbytes / read / 1e9}


def free() -> None:
    """Give memory of the last case back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
