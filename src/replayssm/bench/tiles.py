"""Sweeps of tiles: the candidates for a layout, the fastest of them, and the table that the library reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from replayssm.backends.triton.launch import Tile
from replayssm.bench.cases import Case, power_of_2
from replayssm.bench.compile import Job
from replayssm.bench.conventional import TILES
from replayssm.layout import Layout

# Times a case with these tiles: a row with "ms" (the cycle) and "ms_step".
Measure = Callable[[Case, Mapping[str, Tile]], dict[str, Any]]


def decode_tiles(layout: Layout) -> Iterator[Tile]:
    """Tiles of the step that are worth measuring."""
    columns = power_of_2(layout.state_dim)
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
    columns = power_of_2(layout.state_dim)
    if layout.max_draft == 1:
        yield Tile(64 if layout.head_dim % 64 == 0 else 16, columns, 4, 2)
        yield Tile(32, columns, 4, 4, 128)
        yield Tile(32, columns, 4, 3, 168)


def candidates(layout: Layout) -> dict[str, list[Tile]]:
    """The tiles of both kernels; a layout with drafts has the fold of the plain one."""
    found = {"step": list(decode_tiles(layout)), "fold": list(fold_tiles(layout))}
    return {kernel: list(dict.fromkeys(tiles)) for kernel, tiles in found.items() if tiles}


def jobs(case: Case) -> list[Job]:
    """What to compile before a sweep."""
    found = [Job(case, {kernel: tile}) for kernel, tiles in candidates(case.layout).items() for tile in tiles]
    return found + ([Job(case, knobs=knobs) for knobs in TILES] if case.draft == 1 else [])


def sweep(
    case: Case,
    measure: Measure,
    write: Callable[[dict[str, Any]], None] = lambda row: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Tile]:
    """Time every tile of the step, then of the fold with the best step; return the best of each.

    A tile that does not compile or fit is noted and not chosen.
    """
    best: dict[str, Tile] = {}
    for kernel, tiles in candidates(case.layout).items():
        found: list[tuple[float, Tile]] = []
        for tile in tiles:
            try:
                row = measure(case, {**best, kernel: tile})
            except Exception as problem:  # a tile that this GPU cannot run is one that is not chosen
                note(f"{kernel} {tile}: {type(problem).__name__} {str(problem)[:80]}")
                continue
            found.append((row["ms_step" if kernel == "step" else "ms"], tile))
            write({"sweep": kernel, **asdict(case), "tile": list(asdict(tile).values()), **row})
        if found:
            best[kernel] = min(found, key=lambda item: item[0])[1]
    return best
