"""`replayssm tune`: find the fastest tiles of this GPU's kernels and write the table that the library reads."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from replayssm.bench import cases as bench_cases
from replayssm.bench import rows as bench_rows
from replayssm.bench.compile import Compiler, default_workers
from replayssm.bench.kernel import measure_replay
from replayssm.bench.timing import Setup

from .common import UserError, command, console, print_json
from .options import PRECISION

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile
    from replayssm.bench.tiles import Search


@command
def tune(
    recurrence: Annotated[list[str] | None, typer.Option(help="mamba2, gdn or kda; repeat for several")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="a published shape, a part of its name, or sizes: gdn-32x128x128g16")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="rows")] = 256,
    draft: Annotated[
        list[int] | None, typer.Option(min=1, help="tokens a step (default: 1 and 4; all above 1 share a tile)")
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="entries of the buffer, drafts included")] = None,
    precision: Annotated[list[str] | None, PRECISION] = None,
    rounds: Annotated[int, typer.Option(min=0, help="how often to try the neighbours of the best tile")] = 3,
    workers: Annotated[int, typer.Option(min=0, help="processes that compile ahead; 0: none")] = default_workers(),
    seconds: Annotated[float, typer.Option(min=0, help="start no case after so many seconds")] = float("inf"),
    out: Annotated[
        Path | None, typer.Option(help="folder of tables (default: $REPLAYSSM_TILES, where the library looks)")
    ] = None,
    rows: Annotated[Path | None, typer.Option(help="add every measurement to this file of JSON lines")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Time the legal tiles of step and fold on this GPU and keep the fastest, for plain decode and for drafts.

    The table is written after each case, so an interrupted run keeps what it found; entries of other layouts stay.
    """
    if not torch.cuda.is_available():
        raise UserError("tune: needs a CUDA device; the CPU kernels have no tiles")
    folder = _folder(out)
    chosen = bench_cases.Choice(
        recurrences=recurrence or (),
        shapes=shape or (),
        batches=[batch],
        drafts=draft or (1, 4),
        windows=[window] if window else (),
        precisions=precision or ["fp32"],
    ).cases("cuda")
    origin = bench_rows.provenance("cuda")
    setup = Setup("cuda", least=8, budget_ms=60)
    with Compiler(setup, workers, _note) as compiler:
        search = _search(setup, compiler, rounds, rows, origin)
        found = search_all(chosen, search, folder, origin["gpu"], seconds, _note)
    if json:
        print_json({"gpu": origin["gpu"], "tiles": {key: list(vars(tile).values()) for key, tile in found.items()}})
        return
    table = Table("kernel", "rows", "columns", "warps", "programs", "registers", "stages", "heads")
    for key, tile in found.items():
        table.add_row(key, *map(str, vars(tile).values()))
    console().print(table)
    if os.environ.get("REPLAYSSM_TILES") != str(folder):
        _note(f"The library reads them where REPLAYSSM_TILES={folder}")


def search_all(
    cases: list[bench_cases.Case],
    search: Search,
    folder: Path,
    gpu: str,
    seconds: float = float("inf"),
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Tile]:
    """Sweep the cases; a name that two share takes the tile of the first. The table is merged after each."""
    from replayssm.bench.tiles import keys, merge

    started, found = time.monotonic(), {}
    for case in cases:
        if time.monotonic() - started > seconds:
            note(f"out of time before {case.name}")
            break
        wanted = {kernel: key for kernel, key in keys(case).items() if key not in found}
        best: dict[str, Tile] = {}
        for kernel, key in wanted.items():
            note(f"{case.name}: {key}")
            best[kernel] = found[key] = search.best(case, kernel, torch.device("cuda"), best)
        note(f"wrote {merge(folder, gpu, datetime.date.today().isoformat(), {k: found[k] for k in wanted.values()})}")
    return found


def _search(setup: Setup, compiler: Compiler, rounds: int, rows: Path | None, origin: dict[str, Any]) -> Search:
    from replayssm.bench.tiles import Search

    def write(row: dict[str, Any]) -> None:
        if rows is not None:
            bench_rows.append(rows, {**row, **origin})

    return Search(lambda case, tiles: measure_replay(case, setup, tiles), compiler, rounds, write, _note)


def _folder(out: Path | None) -> Path:
    named = out or (Path(found) if (found := os.environ.get("REPLAYSSM_TILES")) else None)
    if named is None:
        raise UserError("tune: say where the table goes: --out FOLDER, or REPLAYSSM_TILES=FOLDER")
    named.mkdir(parents=True, exist_ok=True)
    return named


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
