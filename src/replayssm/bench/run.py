"""A run of ``bench kernel``: cases one after the other, each row written as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from replayssm.bench import compile, kernel
from replayssm.bench.accuracy import errors
from replayssm.bench.cases import Case, make_case
from replayssm.bench.conventional import TILES, best_tile
from replayssm.bench.timing import Setup, ceilings, free

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile

Row = dict[str, Any]


@dataclass
class Run:
    """What the cases of a run share.

    Attributes:
        setup: device and sizes.
        write: is given every row.
        note: is given a line about what did not work.
        sweep: shapes whose tiles are swept first.
        workers: processes that compile first; 0: none do.
        seconds: no case starts after so many.
        peers: time published kernels as well.
    """

    setup: Setup
    write: Callable[[Row], None]
    note: Callable[[str], None]
    sweep: Sequence[str] = ()
    workers: int = 0
    seconds: float = float("inf")
    peers: bool = False
    started: float = field(default_factory=time.monotonic)
    _knobs: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _tiles: dict[tuple[str, int, str], dict[str, Tile]] = field(default_factory=dict)
    _errors: dict[tuple[str, int, int, str], dict[str, float]] = field(default_factory=dict)

    def precompile(self, cases: Sequence[Case]) -> None:
        """Compile what the cases need, and the tiles of those that are swept, in half of the time at most."""
        if not self.workers or self.setup.device != "cuda":
            return
        jobs = [job for case in cases for job in (compile.Job(case), *self._sweep_jobs(case))]
        jobs += [compile.Job(make_case(shape, 1), knobs=k) for shape in {c.shape: c for c in cases} for k in TILES]
        with compile.Compiler(self.setup, self.workers, self.note) as compiler:
            compiler(jobs, self.seconds / 2)

    def cases(self, cases: Sequence[Case], done: Callable[[Case, Row | None], None]) -> list[Row]:
        """Measure the cases; a case that fails is noted and the next one follows."""
        ceiling = ceilings(self.setup)
        self.write(ceiling)
        rows = []
        for case in cases:
            if time.monotonic() - self.started > self.seconds:
                self.note(f"out of time before {case.name}")
                break
            try:
                row = self._case(case, ceiling)
            except Exception as problem:
                self.note(f"{case.name}: {type(problem).__name__} {str(problem)[:300]}")
                row = None
            else:
                self.write(row)
                rows.append(row)
            free()
            done(case, row)
        return rows

    def _case(self, case: Case, ceiling: Row) -> Row:
        place = case.shape, case.batch
        if place not in self._knobs:
            self._knobs[place] = best_tile(case, self.setup)
        precise = case.shape, case.draft, case.window, case.precision
        if precise not in self._errors:
            self._errors[precise] = errors(case, self.setup.device)
        row = kernel.figure(case, self.setup, ceiling, self._knobs[place], self._best(case))
        return {**row, **self._errors[precise], **(self._peers(case) if self.peers else {})}

    def _peers(self, case: Case) -> Row:
        from replayssm.bench import peers

        if self.setup.device == "cpu":
            return {"peers": {}, "peers_missing": {peer.name: "needs a CUDA device" for peer in peers.PEERS}}
        return {"peers": peers.measure(case, self.setup, self.note), "peers_missing": peers.missing()}

    def _best(self, case: Case) -> dict[str, Tile]:
        """The tiles of a shape that is swept; none where the library's own choice is measured."""
        if case.shape not in self.sweep or self.setup.device != "cuda":
            return {}
        from replayssm.bench.tiles import Search

        kind = self._swept(case)
        if kind not in self._tiles:
            short = replace(self.setup, budget_ms=60)
            search = Search(lambda c, t: kernel.measure_replay(c, short, t), write=self.write, note=self.note)
            known = self._tiles.get((case.shape, 1, case.precision), {})
            self._tiles[kind] = search.sweep(case, torch.device(self.setup.device), known)
        return self._tiles[kind]

    def _swept(self, case: Case) -> tuple[str, int, str]:
        return case.shape, case.draft, case.precision

    def _sweep_jobs(self, case: Case) -> list[compile.Job]:
        if case.shape not in self.sweep:
            return []
        from replayssm.bench.tiles import jobs

        return jobs(case, torch.device(self.setup.device))
