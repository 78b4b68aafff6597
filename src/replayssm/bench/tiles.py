"""Tiles: candidates for a layout, the fastest of them, and the table of them that the library reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from replayssm.backends.triton import formats
from replayssm.backends.triton.launch import Tile, choose_tile, least_rows, read_table, table_file, tile_key, walks
from replayssm.bench.cases import Case, power_of_2
from replayssm.bench.compile import Job
from replayssm.layout import Layout

# The values of each knob that a search steps through, one at a time.
LADDERS = {
    "p": (16, 32, 64, 128),
    "k": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8),
    "programs": (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64),
    "registers": (0, 96, 128, 168, 232),
    "stages": (1, 2, 3, 4),
    "heads": (1, 2, 4, 8),
}
# A tile has to be this much faster to be called so: less is noise.
GAIN = 0.995


def decode_tiles(layout: Layout) -> Iterator[Tile]:
    """Tiles of the step that are worth measuring."""
    columns = power_of_2(layout.state_dim)
    if layout.max_draft > 1:
        for p, warps, programs, registers, stages in (
            (32, 1, 8, 0, 2),
            (16, 1, 8, 0, 2),
            (32, 1, 12, 168, 2),
            (16, 1, 12, 168, 2),
            (16, 1, 16, 128, 2),
            (32, 1, 8, 0, 1),
            (64, 2, 4, 0, 2),
            (32, 1, 8, 0, 3),
            (32, 1, 8, 0, 4),
            (64, 2, 4, 0, 3),
        ):
            yield Tile(p, columns, warps, programs, registers, stages)
        return
    # One warp, so that products need no other's rows; two heads of one key where there are as many.
    wide = min(32 if formats.element_bytes(layout.precision.steps_read.name) > 1 else 64, columns)
    for p, programs, registers, stages, heads in (
        (16, 16, 128, 1, 2),
        (16, 12, 168, 1, 2),
        (16, 16, 128, 2, 1),
        (16, 12, 168, 1, 1),
        (32, 16, 128, 1, 2),
        (32, 16, 128, 1, 1),
        (32, 16, 128, 2, 1),
        (32, 16, 128, 1, 4),
        (64, 12, 168, 1, 4),
    ):
        yield Tile(p, wide, 1, programs, registers, stages, heads)
    yield Tile(64, wide, 4, 4, 128, 1, heads=4)


def fold_tiles(layout: Layout) -> Iterator[Tile]:
    """Tiles of the fold that are worth measuring."""
    columns = power_of_2(layout.state_dim)
    if walks(layout):
        columns = min(32, columns)
        yield Tile(16, columns, 1, 16, 128, 1)
        yield Tile(16, columns, 1, 12, 168, 1)
    else:
        for p, programs, registers in ((32, 8, 0), (16, 16, 128), (16, 8, 0), (16, 12, 168), (32, 12, 168)):
            yield Tile(p, columns, 1, programs, registers, 1)
    for p, warps, programs, registers in ((64, 4, 4, 128), (32, 2, 8, 128), (64, 2, 4, 168), (32, 4, 4, 128)):
        yield Tile(p, columns, warps, programs, registers, 1)


def candidates(kernel: str, layout: Layout, device: torch.device) -> list[Tile]:
    """What a search starts from: the tile in use first, then those that are legal for the layout."""
    found = (decode_tiles if kernel == "step" else fold_tiles)(layout)
    legal = [replace(tile, heads=min(tile.heads, shared(layout))) for tile in found if _legal(tile, layout, kernel)]
    return list(dict.fromkeys([choose_tile(kernel, layout, device), *legal]))


def shared(layout: Layout) -> int:
    """Heads that a tile may take together: those of one key, as far as they are a power of two."""
    share = 1 if layout.recurrence.decay == "channel" else layout.heads // layout.groups
    return share & -share


def _legal(tile: Tile, layout: Layout, kernel: str) -> bool:
    """As many rows as the formats need and at most those that the layout has, rounded up to a power of two."""
    rows = least_rows(kernel, layout)
    return rows <= tile.p <= max(16, rows, power_of_2(layout.head_dim) * tile.heads)


def kernels(layout: Layout) -> tuple[str, ...]:
    """The kernels whose tiles a layout is swept for; with drafts, the fold is that of plain decode."""
    return ("step", "fold") if layout.max_draft == 1 else ("step",)


def neighbours(tile: Tile, layout: Layout, kernel: str) -> list[Tile]:
    """Tiles that differ in one knob by one place of its ladder, as far as they are legal for the layout.

    Rows stay within head_dim and columns within state_dim, each rounded up to a power of two; only plain decode cuts
    the columns into parts, and a fold has one stage.
    """
    decode = kernel == "step" and layout.max_draft == 1
    most = {"p": power_of_2(layout.head_dim), "k": power_of_2(layout.state_dim), "heads": shared(layout)}
    found = []
    for knob, ladder in LADDERS.items():
        if (knob in ("k", "heads") and not decode) or (knob == "stages" and kernel == "fold"):
            continue
        here = getattr(tile, knob)
        below = [value for value in ladder if value < here][-1:]
        above = [value for value in ladder if value > here][:1]
        found += [replace(tile, **{knob: v}) for v in below + above if v <= most.get(knob, v)]
    return [near for near in found if _legal(near, layout, kernel)]


@dataclass(frozen=True)
class Search:
    """How tiles are measured.

    Attributes:
        measure: times a case with tiles: a row with "ms" (the cycle) and "ms_step".
        compile: compiles jobs ahead of their timing.
        rounds: how often the neighbours of the best tile are tried, as long as one is better.
        write: is given every row.
        note: is given a line for a tile that does not run.
    """

    measure: Callable[[Case, Mapping[str, Tile]], dict[str, Any]]
    compile: Callable[[Sequence[Job]], None] = lambda jobs: None
    rounds: int = 0
    write: Callable[[dict[str, Any]], None] = lambda row: None
    note: Callable[[str], None] = lambda text: None

    def sweep(self, case: Case, device: torch.device, tiles: Mapping[str, Tile] | None = None) -> dict[str, Tile]:
        """The best tile of the step, then of the fold with it; ``tiles`` are used for what is not swept."""
        best = dict(tiles or {})
        for kernel in kernels(case.layout):
            best[kernel] = self.best(case, kernel, device, best)
        return best

    def best(self, case: Case, kernel: str, device: torch.device, others: Mapping[str, Tile]) -> Tile:
        """The best tile of one kernel: of the candidates, then of the best one's neighbours.

        A tile that does not compile or fit is noted and not chosen.
        """
        times: dict[Tile, float] = {}
        todo, best = candidates(kernel, case.layout, device), None
        for number in range(self.rounds + 1):
            self.compile([Job(case, {**others, kernel: tile}) for tile in todo])
            for tile in todo:
                times[tile] = self._time(case, kernel, tile, others)
            fastest = min(times, key=lambda tile: times[tile])
            if times[fastest] == float("inf") or (best is not None and times[fastest] > GAIN * times[best]):
                break
            best = fastest
            todo = [tile for tile in neighbours(best, case.layout, kernel) if tile not in times]
            if not todo or number == self.rounds:
                break
        return best or candidates(kernel, case.layout, device)[0]

    def _time(self, case: Case, kernel: str, tile: Tile, others: Mapping[str, Tile]) -> float:
        try:
            row = self.measure(case, {**others, kernel: tile})
        except Exception as problem:  # a tile that this GPU cannot run is one that is not chosen
            self.note(f"{kernel} {tile}: {type(problem).__name__} {str(problem)[:80]}")
            return float("inf")
        self.write({"sweep": kernel, **asdict(case), "tile": list(astuple(tile)), **row})
        return row["ms_step" if kernel == "step" else "ms"]


def jobs(case: Case, device: torch.device) -> list[Job]:
    """What to compile before a sweep without rounds."""
    return [Job(case, {k: tile}) for k in kernels(case.layout) for tile in candidates(k, case.layout, device)]


def keys(case: Case) -> dict[str, str]:
    """The names in a table of the kernels that a case is swept for."""
    return {kernel: tile_key(kernel, case.layout) for kernel in kernels(case.layout)}


def merge(folder: Path, gpu: str, date: str, found: Mapping[str, Tile]) -> Path:
    """Put tiles by key into the GPU's file of a folder; its other entries stay. Returns the file."""
    path = table_file(folder, gpu)
    tiles: dict[str, Sequence[int]] = {**(read_table(path) if path.exists() else {})}
    tiles |= {key: list(astuple(tile)) for key, tile in found.items()}
    names = [field.name for field in fields(Tile)]
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(tile)}" for key, tile in sorted(tiles.items()))
    head = "".join(
        f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in (("gpu", gpu), ("date", date), ("fields", names))
    )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head} "tiles": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    return path
