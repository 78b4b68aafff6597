"""Compile the kernels of many cases in parallel processes, so that timing finds them in Triton's cache on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from replayssm.bench.cases import Case
from replayssm.bench.conventional import Conventional
from replayssm.bench.replay import Replay
from replayssm.bench.timing import Setup

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile


@dataclass(frozen=True)
class Job:
    """One model step: of replay with these tiles, or of the conventional side with these knobs."""

    case: Case
    tiles: dict[str, Tile] = field(default_factory=dict)
    knobs: tuple[int, int] | None = None

    def run(self, setup: Setup) -> None:
        """Run it once."""
        import torch

        if self.knobs is None:
            Replay(self.case, setup, self.tiles).model_step()
        else:
            Conventional(self.case, replace(setup, megabytes=1), self.knobs).model_step()
        torch.cuda.synchronize()


def precompile(jobs: Iterable[Job], setup: Setup, workers: int, note: Callable[[str], None]) -> None:
    """Run every job once in ``workers`` processes; what does not compile is noted and left to the timing to meet."""
    from multiprocessing import get_context

    todo = [(job, setup) for job in jobs]
    with get_context("spawn").Pool(min(workers, len(todo)) or 1, maxtasksperchild=64) as pool:
        for problem in pool.imap_unordered(_compile, todo):
            if problem:
                note(problem)


def default_workers() -> int:
    """Processes that compile at once: each takes a core and some of the GPU's memory."""
    return min(12, os.cpu_count() or 1)


def _compile(task: tuple[Job, Setup]) -> str:
    job, setup = task
    try:
        job.run(setup)
    except Exception as problem:
        return f"{job.case.name} {job.tiles or job.knobs}: {type(problem).__name__} {str(problem)[:200]}"
    return ""
