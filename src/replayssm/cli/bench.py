"""`replayssm bench`: measure on this machine. `bench kernel` times one layer's decode against the conventional step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from replayssm.bench import rows as bench_rows
from replayssm.bench.cases import Case, Choice, name_of
from replayssm.bench.compile import default_workers
from replayssm.bench.run import Run
from replayssm.bench.timing import Setup

from .common import UserError, command, console, print_json
from .options import PRECISION

Row = dict[str, Any]

bench = typer.Typer(
    name="bench", help="Measure on this machine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@bench.callback()
def group() -> None:
    """Measure on this machine."""


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
    layers: Annotated[
        int | None, typer.Option(min=1, help="least layers; they share a commit and a fold (default: CUDA 8, CPU 1)")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="time fla and FlashInfer too, where importable")] = False,
    sweep: Annotated[
        list[str] | None, typer.Option(help="CUDA: sweep the tiles of this shape first, and use the best")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="CUDA: processes that compile first; 0: none")
    ] = default_workers(),
    compile_only: Annotated[bool, typer.Option("--compile-only", help="compile and stop")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="start no case after so many seconds")] = float("inf"),
    list_cases: Annotated[bool, typer.Option("--list", help="print the cases and stop")] = False,
    source: Annotated[
        list[Path] | None, typer.Option("--from", help="take the rows of this file instead of measuring; repeat")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="add the rows to this file of JSON lines, as they come")] = None,
    plots: Annotated[Path | None, typer.Option(help="draw the rows into this folder")] = None,
    page: Annotated[Path | None, typer.Option(help="put the rows into the table of this Markdown page")] = None,
    commit: Annotated[str, typer.Option(help="what rows say of the commit, outside of a checkout")] = "",
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Time a layer's decode over full cycles, commit and folds inside, against the conventional step.

    The latest row of a case counts where --from names several.
    """
    lists = (recurrence, shape, batch, draft, window, precision, case)
    choice = Choice(*(each or () for each in lists))  # type: ignore[arg-type]
    if source:
        rows = [row for row in bench_rows.read(source) if choice.has(row)]
        if not rows:
            raise UserError("--from: no figure of the cases asked for")
    else:
        where = _device(device)
        chosen = choice.cases(where)
        if list_cases:
            print("\n".join(each.name for each in chosen))
            return
        cuda = where == "cuda"
        setup = Setup(where, megabytes or (400 if cuda else 256), layers or (8 if cuda else 1))
        run = Run(
            setup, _writer(out, bench_rows.provenance(where, commit)), _note, sweep or (), workers, seconds, peers
        )
        rows = _measure(run, chosen, compile_only)
        if compile_only:
            return
        if not rows:
            raise UserError("no case could be measured")
    _draw(rows, plots, page)
    if json:
        print_json({"rows": rows})
    else:
        console().print(_table(rows))
        for note in dict.fromkeys(
            f"{name}: {why}" for row in rows for name, why in row.get("peers_missing", {}).items()
        ):
            console().print(f"[dim]{note}[/]")


def _device(name: str | None) -> str:
    if name not in (None, "cuda", "cpu"):
        raise UserError(f"--device {name}: expected cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _writer(out: Path | None, origin: Row) -> Callable[[Row], None]:
    """Complete a row with its origin and add it to the file."""

    def write(row: Row) -> None:
        row.update(origin)
        if out is not None:
            bench_rows.append(out, row)

    return write


def _measure(run: Run, chosen: list[Case], compile_only: bool) -> list[Row]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("compile", total=len(chosen))
        run.precompile(chosen)
        if compile_only:
            return []

        def done(case: Case, row: Row | None) -> None:
            progress.update(task, advance=1, description=case.name)
            if row is not None:
                terminal.print(
                    f"{case.name}: {row['ms']:.4f} ms, step {row['ms_step']:.4f}, conventional "
                    f"{row['ms_conventional']:.4f} ({row['ratio']:.2f}x), error {row['error']:.1e}",
                    highlight=False,
                    soft_wrap=True,
                )

        return run.cases(chosen, done)


def _draw(rows: Sequence[Row], plots: Path | None, page: Path | None) -> None:
    if plots is not None:
        from replayssm.bench.plots import draw

        for path in draw(rows, plots):
            _note(f"wrote {path}")
    if page is not None:
        from replayssm.bench.page import rewrite

        rewrite(page, rows)
        _note(f"wrote {page}")


def _table(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
    head = ("case", "ms", "step", "conv.", "ratio", "read", "fold", "error", "conv.", *names)
    table = Table(*head, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[: len(head) - len(names)]:
        column.no_wrap = True
    for shape in dict.fromkeys(row["shape"] for row in rows):
        table.add_section()
        table.add_row(f"[bold]{shape}[/]")
        for row in (row for row in rows if row["shape"] == shape):
            table.add_row(
                " ".join(name_of(row).split("/")[1:]).removesuffix(" fp32"),
                *(f"{row[key]:.4f}" for key in ("ms", "ms_step", "ms_conventional")),
                f"{row['ratio']:.2f}×",
                f"{row['read_share']:.0%}",
                f"{row['fold_over_copy']:.2f}×" if "fold_over_copy" in row else "",
                *(f"{row[key]:.1e}" for key in ("error", "error_conventional")),
                *(f"{row['peers'][name]:.4f}" if name in row.get("peers", {}) else "" for name in names),
            )
    return table
