"""`replayssm bench step` and `bench spec`: whole steps of published sizes with random weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from replayssm.bench.models import MODELS, raw_config
from replayssm.bench.rows import append, provenance, version
from replayssm.bench.steady import Work
from replayssm.bench.step import Bench, in_words, works
from replayssm.bench.timing import free
from replayssm.engine.runner import window_of

from .bench import bench
from .common import UserError, command, console, print_json
from .options import PRECISION

CONFIG = typer.Option(help=f"{', '.join(MODELS)}, a shipped name or a config.json; repeat for several")
BATCHES = (1, 16, 64, 256, 512)
STEP_BATCH = typer.Option(min=1, help=f"sequences; repeat for several (default: {', '.join(map(str, BATCHES))})")
SPEC_BATCH = typer.Option(min=1, help="sequences; repeat for several (default: 256)")
CONTEXT = typer.Option(min=1, help="tokens of every sequence, random; repeat for several")
WINDOW = typer.Option(min=1, help="entries of the buffer, drafts included (default: the fastest, see docs/planning.md)")
LAYERS = typer.Option(min=1, help="only the model's first layers; rows say it")
DEVICE = typer.Option(help="cuda or cpu (default: cuda where there is one)")
CYCLES = typer.Option(min=1, help="full cycles of folds that are timed")
OUT = typer.Option(help="add the rows to this file of JSON lines, as they come")
PLOT = typer.Option(help="write a plot of the rows to this PNG")
COMMIT = typer.Option(help="what rows say of the commit, outside of a checkout")
SECONDS = typer.Option(min=0, help="start no case after so many seconds")
JSON = typer.Option("--json", help="print one JSON document and nothing else")
HOST = typer.Option("--engine", help="also the wall clock of Engine.step, host and read-back included")


@bench.command()
@command
def step(
    config: Annotated[list[str] | None, CONFIG] = None,
    batch: Annotated[list[int] | None, STEP_BATCH] = None,
    context: Annotated[list[int] | None, CONTEXT] = None,
    precision: Annotated[list[str] | None, PRECISION] = None,
    window: Annotated[int | None, WINDOW] = None,
    layers: Annotated[int | None, LAYERS] = None,
    cycles: Annotated[int, CYCLES] = 5,
    engine: Annotated[bool, HOST] = False,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[Path | None, OUT] = None,
    plot: Annotated[Path | None, PLOT] = None,
    commit: Annotated[str, COMMIT] = "",
    seconds: Annotated[float, SECONDS] = float("inf"),
    json: Annotated[bool, JSON] = False,
) -> None:
    """Time a whole decode step of a model with random weights: replay and conventional in the same engine."""
    case = {"batches": batch or BATCHES, "contexts": context or [1024], "precisions": precision or ["fp32"]}

    def measure(bench: Bench, work: Work) -> dict[str, Any]:
        return bench.decode(work, cycles, engine)

    rows = _run("step", config, device, layers, case | {"window": window}, measure, (out, commit), seconds)
    _show(rows, _step_table, plot, json)


@bench.command()
@command
def spec(
    config: Annotated[list[str] | None, CONFIG] = None,
    batch: Annotated[list[int] | None, SPEC_BATCH] = None,
    context: Annotated[list[int] | None, CONTEXT] = None,
    draft: Annotated[int, typer.Option(min=2, max=16, help="tokens a step, the one before the drafts included")] = 4,
    accepted: Annotated[
        list[int] | None,
        typer.Option(min=1, help="tokens kept, step by step, over and over; sequence r begins at the r-th; repeat"),
    ] = None,
    precision: Annotated[list[str] | None, PRECISION] = None,
    window: Annotated[int | None, WINDOW] = None,
    layers: Annotated[int | None, LAYERS] = None,
    cycles: Annotated[int, CYCLES] = 5,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[Path | None, OUT] = None,
    plot: Annotated[Path | None, PLOT] = None,
    commit: Annotated[str, COMMIT] = "",
    seconds: Annotated[float, SECONDS] = float("inf"),
    json: Annotated[bool, JSON] = False,
) -> None:
    """Time a whole verify step with a synthetic acceptance schedule, against a state snapshot for each draft."""
    case = {"batches": batch or [256], "contexts": context or [1024], "precisions": precision or ["fp32"]}
    case |= {"draft": draft, "schedule": tuple(accepted or [max(1, draft - 1)]), "window": window}

    def measure(bench: Bench, work: Work) -> dict[str, Any]:
        return bench.spec(work, cycles)

    rows = _run("spec", config, device, layers, case, measure, (out, commit), seconds)
    _show(rows, _spec_table, plot, json)


def _run(
    kind: str,
    configs: list[str] | None,
    device: str | None,
    layers: int | None,
    case: dict[str, Any],
    measure: Any,
    record: tuple[Path | None, str],
    seconds: float,
) -> list[dict[str, Any]]:
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where not in ("cuda", "cpu"):
        raise UserError(f"--device {device}: expected cuda or cpu")
    if where == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device")
    out, commit = record
    rows: list[dict[str, Any]] = []
    window = case.pop("window")
    names = configs or list(MODELS)[:1]
    works(**case, window=window or 32)  # raises for wrong numbers before a model is built, and so do wrong names:
    for name in names:
        raw_config(name)
    origin = {"transformers": version("transformers"), **provenance(where, commit)}
    until = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > until:
            _note(f"out of time before {name}")
            break
        try:
            bench = Bench(name, where, layers, _note)
        except Exception as problem:  # the other models may still run
            _note(f"{name}: {in_words(problem)}")
            free()
            continue
        for work in works(**case, window=window or window_of(bench.model, case.get("draft", 1))):
            label = f"{name}, batch {work.batch}, context {work.context}, {work.precision}"
            if time.monotonic() > until:
                _note(f"out of time before {label}")
                break
            _note(label)
            row = {"bench": kind, **measure(bench, work), **origin}
            rows.append(row)
            if out is not None:
                append(out, row)
        del bench
    if not rows:
        raise UserError("no case could be measured")
    return rows


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(rows: list[dict[str, Any]], table: Any, plot: Path | None, json: bool) -> None:
    if plot is not None:
        from replayssm.bench.step_plots import draw

        draw(rows, plot)
    if json:
        print_json({"rows": rows})
    else:
        console().print(table(rows))
        for row in rows:
            case = f"{_name(row)}, batch {row['batch']}, context {row['context']}, {row['precision']}"
            for way, problem in row.get("problems", {}).items():
                console().print(f"{case}, {way}: {problem}", soft_wrap=True)
    if not any(row["ms"] or row["ms_conventional"] for row in rows):
        raise UserError("no case could be measured")


def _ms(value: float | None) -> str:
    return "see below" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _step_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "batch", "context", "precision", "ms", "usual", "ratio", "engine", "fit")
    for row in rows:
        table.add_row(
            _name(row),
            *(str(row[key]) for key in ("batch", "context", "precision")),
            _ms(row["ms"]),
            _ms(row["ms_conventional"]),
            _times(row.get("ratio")),
            _ms(row["ms_engine"]) if "ms_engine" in row else "",
            _fit(row),
        )
    return table


def _spec_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("model", "batch", "context", "kept", "precision", "ms", "usual", "ratio", "plain", "gain", "fit")
    table = Table(*columns)
    for row in rows:
        table.add_row(
            _name(row),
            *(str(row[key]) for key in ("batch", "context")),
            f"{row['accepted']:.2f} of {row['draft']}",
            row["precision"],
            _ms(row["ms"]),
            _ms(row["ms_conventional"]),
            _times(row.get("ratio")),
            _ms(row["ms_plain"]),
            _times(row.get("ratio_plain")),
            _fit(row),
        )
    return table


def _name(row: dict[str, Any]) -> str:
    name = Path(row["model"]).stem if row["model"].endswith(".json") else row["model"]
    return name if row["layers"] is None else f"{name}, {row['layers']} layers"


def _fit(row: dict[str, Any]) -> str:
    """How many sequences fit, and in the same memory against the conventional way."""
    if "concurrency" not in row:
        return ""
    count = f"{row['sequences']} " if "sequences" in row else ""
    return f"{count}({row['concurrency']:.2f}×)"
