"""Compile the kernels of many cases in parallel processes, so that timing finds them in Triton's cache on disk.

Batch and layers are no compile-time numbers of step and fold, so that a job runs with few of both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import TimeoutError as NoAnswer
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from replayssm.bench.accuracy import errors
from replayssm.bench.cases import Case
from replayssm.bench.conventional import Conventional
from replayssm.bench.replay import Replay
from replayssm.bench.timing import Setup, free

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile


ROWS = 16
# A job that says nothing for so many seconds has died with its process.
PATIENCE = 300.0


@dataclass(frozen=True)
class Job:
    """One model step: of replay with these tiles, or of the conventional side with these knobs.

    With neither, all that a case needs but the conventional tiles: one window of replay and of the reference.
    """

    case: Case
    tiles: dict[str, Tile] = field(default_factory=dict)
    knobs: tuple[int, int] | None = None

    def run(self, setup: Setup) -> None:
        """Run it once."""
        small, few = replace(self.case, batch=ROWS), replace(setup, megabytes=1, least=1)
        if self.knobs is not None:
            Conventional(small, few, self.knobs).model_step()
        elif self.tiles:
            Replay(small, few, self.tiles).model_step()
        else:
            errors(small, setup.device, windows=1)
        if setup.device == "cuda":
            torch.cuda.synchronize()

    @property
    def key(self) -> str:
        """Two jobs with the same one compile the same."""
        return repr(replace(self, case=replace(self.case, batch=ROWS)))


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

    def __call__(self, jobs: Iterable[Job], seconds: float = float("inf")) -> None:
        """Compile what the jobs run, for at most so many seconds."""
        if self.pool is None:
            return
        todo = list({job.key: job for job in jobs}.values())
        started = said = time.monotonic()
        answers = self.pool.imap_unordered(_compile, [(job, self.setup) for job in todo])
        for done in range(1, len(todo) + 1):
            try:
                problem = answers.next(min(PATIENCE, max(0.0, started + seconds - time.monotonic())))
            except NoAnswer:
                self.note(f"compiled {done - 1} of {len(todo)}, the others when they are timed")
                return
            if problem:
                self.note(problem)
            if done == len(todo) or time.monotonic() - said > 10:
                said = time.monotonic()
                self.note(f"compiled {done} of {len(todo)}, {said - started:.0f} s")


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
