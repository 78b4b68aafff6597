"""Compile the kernels of many cases in parallel processes, so that timing finds them in Triton's cache on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from replayssm.bench.cases import Case
from replayssm.bench.conventional import Conventional
from replayssm.bench.replay import Replay
from replayssm.bench.timing import Setup, free

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
        if self.knobs is None:
            Replay(self.case, setup, self.tiles).model_step()
        else:
            Conventional(self.case, replace(setup, megabytes=1), self.knobs).model_step()
        torch.cuda.synchronize()


class Compiler:
    """Processes that run jobs once each; one after the other where there are none. Use it in a ``with`` statement.

    Args:
        setup: of the jobs.
        workers: processes; 0: nothing is compiled ahead.
        note: is given a line for a job that does not run, which is left to the timing to meet.
    """

    def __init__(self, setup: Setup, workers: int, note: Callable[[str], None]) -> None:
        self.setup, self.note = setup, note
        self.pool = get_context("spawn").Pool(workers) if workers else None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.pool is not None:
            self.pool.terminate()

    def __call__(self, jobs: Iterable[Job]) -> None:
        """Compile what the jobs run."""
        if self.pool is None:
            return
        for problem in self.pool.imap_unordered(_compile, [(job, self.setup) for job in jobs]):
            if problem:
                self.note(problem)


def default_workers() -> int:
    """Processes that compile at once: each takes a core and some of the GPU's memory."""
    return min(12, os.cpu_count() or 1)


def _compile(task: tuple[Job, Setup]) -> str:
    job, setup = task
    try:
        job.run(setup)
    except Exception as problem:
        return f"{job.case.name} {job.tiles or job.knobs}: {type(problem).__name__} {str(problem)[:200]}"
    finally:
        free()
    return ""
