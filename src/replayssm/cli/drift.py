"""`replayssm drift`: what rounding the state does over long texts, against the conventional float32 loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from replayssm import models
from replayssm.bench.rows import checkout
from replayssm.drift import policies, rows
from replayssm.drift.rows import Row

from . import setup
from .common import UserError, command, console, print_json
from .options import MODEL

TOKENS = {"cpu": 2048, "cuda": 131072}
CHUNK = {"cpu": 256, "cuda": 1024}
SHOWN = 3
"""Columns of the table for as many lengths: the last one, and others a factor of four apart."""


@command
def drift(
    model: Annotated[str, typer.Argument(help=MODEL)] = models.DEFAULT,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="length of a text (default: 131072 on CUDA, 2048 on the CPU)")
    ] = None,
    policy: Annotated[
        str, typer.Option("--policies", help="separated by commas: conventional[+FORMAT], FORMAT, float32+FORMAT")
    ] = policies.DEFAULT,
    window: Annotated[int, typer.Option(min=1, max=128, help="tokens between two folds")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="texts that are read at once: more tokens to a mean")] = 1,
    chunk: Annotated[int | None, typer.Option(min=1, help="tokens that a forward brings (memory)")] = None,
    attention: Annotated[
        int, typer.Option(min=0, help="how many tokens attention looks back on; 0: all of them")
    ] = 2048,
    text: Annotated[list[Path] | None, typer.Option(help="file to read; repeat (default: the held-out text)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one)")] = None,
    dtype: Annotated[str, typer.Option(help="weights and activations: fp32, bf16, fp16, or auto (as stored)")] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="of stochastic rounding")] = 0,
    out: Annotated[Path | None, typer.Option(help="file for the rows, JSON lines")] = None,
    plot: Annotated[Path | None, typer.Option(help="file for the picture (.png, .svg, .pdf)")] = None,
    commit: Annotated[str, typer.Option(help="what rows say of the commit, outside of a checkout")] = "",
    from_: Annotated[
        list[Path] | None, typer.Option("--from", help="show rows of such files instead of measuring; repeat")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Let a model read real text under several policies at once, and say how far each one's predictions drift off.

    Reported by length: KL divergence of the next token's distribution from the conventional float32 loop's, the share
    of likeliest tokens that agree, the perplexity, and each recurrent layer's error against float64.
    """
    if from_:
        found = rows.read(from_)
    else:
        found = _measure(model, policy, tokens, window, batch, chunk, attention, text, device, dtype, seed)
        found = [{**row, "commit": commit or checkout()} for row in found]
    if out is not None:
        rows.write(out, found)
    if plot is not None:
        from replayssm.drift.plot import draw

        draw(found, plot)
    if json:
        print_json({"rows": found, "comparisons": rows.comparisons(found)})
    else:
        for name in dict.fromkeys(row["model"] for row in found):
            _show([row for row in found if row["model"] == name])


def _measure(
    model: str,
    names: str,
    tokens: int | None,
    window: int,
    batch: int,
    chunk: int | None,
    attention: int,
    text: list[Path] | None,
    device: str | None,
    dtype: str,
    seed: int,
) -> list[Row]:
    import torch

    from replayssm.drift.measure import Drift
    from replayssm.drift.text import token_rows

    chosen = policies.parse(names)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in TOKENS or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(
            f"--device {device}: expected cpu{' or cuda' if torch.cuda.is_available() else ' (no CUDA here)'}"
        )
    length = tokens or TOKENS[device]
    target, tokenizer = setup.load(model, dtype)
    setup.set_threads(target, None)
    documents = [setup.read_text(path) for path in text] if text else models.heldout()
    ids = token_rows(tokenizer, documents, batch, length)
    measured = Drift(target.to(device), chosen, length, batch, window, chunk or CHUNK[device], attention or None, seed)
    with _Bar(length) as bar:
        measured.run(ids, bar)
    return rows.rows_of(measured, models.resolve(model).name)


class _Bar:
    """Progress on stderr: a bar on a terminal, elsewhere a line for every tenth."""

    def __init__(self, total: int) -> None:
        """``total`` tokens are 100 %."""
        columns = TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.total, self.tenths = total, 0
        self.progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self.progress.start()
        return self._advance

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def _advance(self, done: int) -> None:
        self.progress.update(self.task, completed=done)
        if self.progress.disable and done * 10 // self.total > self.tenths:
            self.tenths = done * 10 // self.total
            print(f"{done} of {self.total} tokens", file=sys.stderr, flush=True)


def _show(found: list[Row]) -> None:
    out, first = console(), found[0]
    back = f"the last {first['attention']:,} tokens" if first["attention"] else "all tokens"
    out.print(
        f"[bold]{first['model']}[/] ({', '.join(first['recurrences'])}): {first['texts']} × {first['tokens']:,} tokens "
        f"on {first['device']}, window {first['window']}, {first['dtype']}, attention to {back}"
    )
    places = list(range(len(first["positions"]) - 1, -1, -4))[:SHOWN][::-1]
    at = [f"at {first['positions'][i]:,}" for i in places]
    table = _table("policy", *(f"KL {where}" for where in at), "slope")
    for row in found:
        slope = "" if row["slope"] is None else f"{row['slope']:+.2f} ± {row['slope_error']:.2f}"
        kl = ["–" if rows.is_reference(row) else f"{row['kl'][i]:.1e}" for i in places]
        table.add_row(row["policy"], *kl, slope)
    out.print(table)
    table = _table("policy", "top-1", "perplexity", f"layer error {at[0]}", at[-1])
    for row in found:
        errors = [f"{max(layer[i] for layer in row['layers'].values()):.1e}" for i in (places[0], places[-1])]
        table.add_row(row["policy"], f"{row['agreement'][-1]:.2%}", f"{row['perplexity']:.4f}", *errors)
    out.print(table)
    out.print(
        "[dim]Means over half an octave around each length; top-1: at the end; perplexity: of everything. Slope: of "
        f"log KL over log length from {first['fit_from']:,} on. Layer error: the worst layer's output against the "
        "float64 recurrence of the same inputs.[/]"
    )
    lines = rows.comparisons(found)
    if not lines:
        return
    known = [f"rounded every {what}{how}" for what in ("token", "window") for how in ("", ", sr")]
    kinds = [kind for kind in known if any(kind in line for line in lines)]
    table = _table("format", "KL, rounded reads", *(f"state {kind}" for kind in kinds))
    for line in lines:
        cells = (f"{line[kind]:.1f}×" if kind in line else "" for kind in kinds)
        table.add_row(line["format"], f"{line['read']:.1e}", *cells)
    out.print(table)


def _table(first: str, *others: str) -> Table:
    """A table whose cells are not cut; numbers to the right."""
    return Table(Column(first, no_wrap=True), *(Column(name, justify="right") for name in others))
