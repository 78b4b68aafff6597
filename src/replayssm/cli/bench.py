"""`replayssm bench`: measure on this machine. `bench kernel` times one layer's decode against the conventional step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from replayssm.bench import cases as bench_cases
from replayssm.bench import rows as bench_rows
from replayssm.bench.compile import default_workers
from replayssm.bench.run import Run
from replayssm.bench.timing import Setup

from .common import UserError, command, console, print_json
from .options import PRECISION

bench = typer.Typer(
    name="bench", help="Measure on this machine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@bench.callback()
def group() -> None:
    """Measure on this machine: a layer's kernels."""


@bench.command()
@command
def kernel(
    recurrence: Annotated[list[str] | None, typer.Option(help="mamba2, gdn or kda; repeat for several")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="a published shape, a part of its name, or sizes: gdn-32x128x128g16")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="rows; repeat for several")] = None,
    draft: Annotated[list[int] | None, typer.Option(min=1, help="tokens a step; 1 is plain decode")] = None,
    window: Annotated[list[int] | None, typer.Option(min=1, help="entries of the buffer, drafts included")] = None,
    precision: Annotated[list[str] | None, PRECISION] = None,
    case: Annotated[list[str] | None, typer.Option(help="keep the cases whose name contains this")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda where there is one)")] = None,
    megabytes: Annotated[
        int | None, typer.Option(min=1, help="least MiB of state of all layers: more than the last cache")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="sweep the tiles of this shape first (CUDA); also writes those rows")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="processes that compile first; 0: none")] = default_workers(),
    compile_only: Annotated[bool, typer.Option("--compile-only", help="compile and stop")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="start no case after so many seconds")] = float("inf"),
    list_cases: Annotated[bool, typer.Option("--list", help="print the cases and stop")] = False,
    out: Annotated[Path | None, typer.Option(help="add the rows to this file of JSON lines, as they come")] = None,
    commit: Annotated[str, typer.Option(help="what rows say of the commit, outside of a checkout")] = "",
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Time a layer's decode over full cycles, commit and folds inside, against the conventional step."""
    where = _device(device)
    chosen = bench_cases.select(
        where,
        recurrences=recurrence or (),
        shapes=shape or (),
        batches=batch or (),
        drafts=draft or (),
        windows=window or (),
        precisions=precision or (),
        parts=case or (),
    )
    if list_cases:
        print("\n".join(each.name for each in chosen))
        return
    setup = Setup(where, megabytes or (400 if where == "cuda" else 256))
    origin = bench_rows.provenance(where, commit)

    def write(row: dict[str, Any]) -> None:
        row.update(origin)
        if out is not None:
            bench_rows.append(out, row)

    rows = _run(Run(setup, write, _note, sweep or (), workers, seconds), chosen, compile_only)
    if json:
        print_json({"rows": rows})
    elif not compile_only:
        console().print(_table(rows))


def _device(name: str | None) -> str:
    if name not in (None, "cuda", "cpu"):
        raise UserError(f"--device {name}: expected cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(run: Run, chosen: list[bench_cases.Case], compile_only: bool) -> list[dict[str, Any]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("compile", total=len(chosen))
        run.precompile(chosen)
        if compile_only:
            return []

        def done(case: bench_cases.Case, row: dict[str, Any] | None) -> None:
            progress.update(task, advance=1, description=case.name)
            if row is not None:
                terminal.print(
                    f"{case.name}: {row['ms']:.4f} ms, step {row['ms_step']:.4f}, conventional "
                    f"{row['ms_conventional']:.4f} ({row['ratio']:.2f}x), error {row['error']:.1e}",
                    highlight=False,
                    soft_wrap=True,
                )

        return run.cases(chosen, done)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("case", "ms", "step", "conventional", "ratio", "GB/s", "of read", "error", "conventional")
    for row in rows:
        table.add_row(
            bench_cases.name_of(row),
            *(f"{row[key]:.4f}" for key in ("ms", "ms_step", "ms_conventional")),
            f"{row['ratio']:.2f}×",
            f"{row['bytes'] / row['ms'] / 1e6:.0f}",
            f"{row['read_share']:.0%}",
            *(f"{row[key]:.1e}" for key in ("error", "error_conventional")),
        )
    return table
