"""`replayssm explain`: what a model's recurrent layers cost, and what checkpoint and buffer would save."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.table import Table

from replayssm.layout import GDN, KDA, MAMBA2, Precision
from replayssm.plan import ERROR_CLASSES, Gpu, Setting, choose_precision, gpus, report, resolve

from .common import UserError, command, console, human_bytes, human_time, print_json

_TITLES = {recurrence.name: recurrence.title for recurrence in (MAMBA2, GDN, KDA)}


@command
def explain(
    model: Annotated[str, typer.Argument(help="a shipped name, a folder with a config.json, or such a file")],
    gpu: Annotated[str, typer.Option(help="which GPU to predict for")] = "h200",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="sequences; repeat for several")] = None,
    context: Annotated[int, typer.Option(min=0, help="tokens that attention looks back on")] = 4096,
    window: Annotated[int, typer.Option(min=1, help="entries of the buffer, drafts included")] = 16,
    draft: Annotated[int, typer.Option(min=1, help="tokens a step; 1 is plain decode")] = 1,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="chance that a draft is accepted")] = 0.7,
    memory_gb: Annotated[
        float | None, typer.Option(min=0, help="memory for sequences, GB (default: the GPU's, less the weights)")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="a preset such as float32+fp8 or fp16sr+nvfp4, or auto: the fastest within --error")
    ] = "fp32",
    error: Annotated[
        str, typer.Option(help=f"coarsest reads that auto may take: {', '.join(ERROR_CLASSES)}")
    ] = "close",
    weight_bits: Annotated[float, typer.Option(min=1, help="bits per weight")] = 16.0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Predict what a model moves, how fast it decodes and how many sequences fit, from its sizes alone.

    Every number is arithmetic on the config and on the GPU's bandwidth (docs/planning.md); nothing is measured here.
    """
    shape, facts, batches = resolve(model), _gpu(gpu), tuple(batch or (1, 8, 64, 256, 512))
    auto = precision == "auto"
    policy = Precision() if auto else Precision.preset(precision)
    setting = Setting(window, draft, acceptance, policy, context, weight_bits)
    chosen: dict[str, Any] = {}
    if auto:
        layouts = [setting.layout(layout) for layout in shape.layouts]
        choice = choose_precision(layouts, facts, max(batches), error, acceptance)
        setting = replace(setting, precision=choice.precision)
        chosen = {"auto": {"batch": max(batches), "allowed": error, "error": choice.error}}
    memory = None if memory_gb is None else memory_gb * 1e9
    document = report(shape, facts, setting, batches, memory)
    document["setting"] |= chosen
    if json:
        print_json(document)
    else:
        _show(document)


def _gpu(key: str) -> Gpu:
    known = gpus()
    if key.lower() in known:
        return known[key.lower()]
    close = get_close_matches(key.lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"no GPU {key!r}{hint}. Known: {', '.join(known)}")


def _show(document: dict[str, Any]) -> None:
    model, setting, moved = document["model"], document["setting"], document["recurrent_bytes_per_token"]
    best, out = document["best_window"], console()
    out.print(
        f"[bold]{model['name']}[/] ({model['model_type']}): {model['params_total'] / 1e9:.1f} B weights, "
        f"{model['params_active'] / 1e9:.1f} B a token, {human_bytes(model['weight_bytes'])} "
        f"at {setting['weight_bits']:g} bits"
    )
    if model["source"]:
        out.print(f"[dim]Sizes: {model['source']}[/]")
    out.print(_layers(model["groups"], document["bytes_per_sequence"], setting["context"]))
    out.print(
        f"A token of one sequence moves {human_bytes(moved['conventional'])} in the recurrent layers conventionally, "
        f"{human_bytes(moved['replay'])} with window {setting['window']}. Fewest bytes at window {best['window']}: "
        f"{human_bytes(best['bytes_per_token'])}."
    )
    if auto := setting.get("auto"):
        out.print(f"Precision for batch {auto['batch']}: {setting['precision']} (reads: {auto['error']}).")
    out.print(*_speeds(document), sep="\n")
    out.print(*_memory(document["memory"], document["gpu"]["name"]), sep="\n")
    out.print(
        f"[dim]Predictions, not measurements. Measured for {document['gpu']['name']}: {document['gpu']['measured']}.[/]"
    )


def _layers(groups: list[dict[str, Any]], total: dict[str, int], context: int) -> Table:
    table = Table("blocks", "kind", "sizes", "weights each", "state", "slot with buffer", f"KV at {context}")
    for row in groups:
        kind, sizes = row["kind"], ""
        if "recurrence" in row:
            kind = f"{kind} ({_TITLES[row['recurrence']]})"
            sizes = f"{row['heads']} heads {row['head_dim']}×{row['state_dim']}, {row['groups']} groups"
        each = [
            human_bytes(row[key]) if key in row else ""
            for key in ("state_bytes_each", "slot_bytes_each", "kv_bytes_each")
        ]
        table.add_row(str(row["count"]), kind, sizes, f"{row['params_each'] / 1e6:.1f} M", *each)
    table.add_section()
    table.add_row("", "per sequence", "", "", *(human_bytes(total[key]) for key in ("state", "slot", "kv")))
    return table


def _speeds(document: dict[str, Any]) -> tuple[str, Table]:
    setting, drafts = document["setting"], document["setting"]["draft"]
    what = f"{drafts} tokens a step, {setting['acceptance']:.0%} accepted" if drafts > 1 else "plain decode"
    title = f"Predicted on {document['gpu']['name']}: {what}, context {setting['context']}"
    if not document["model"]["weights_fit"]:
        title += " (the weights do not fit on one: times are as if they did)"
    columns = ["batch", "recurrent: conventional", "replay", "speed-up", "step: conventional", "replay", "speed-up"]
    table = Table(*columns)
    if drafts > 1:
        table.add_column("tokens/s over plain decode")
    for row in document["predictions"]:
        cells = [str(row["batch"])]
        for part in ("recurrent", "step"):
            times = row[f"{part}_seconds"]
            cells += [human_time(times["conventional"]), human_time(times["replay"]), f"{row[f'{part}_speedup']:.2f}×"]
        table.add_row(*cells, *([f"{row['speedup_over_plain']:.2f}×"] if drafts > 1 else []))
    return title, table


def _memory(memory: dict[str, Any], gpu: str) -> tuple[str, Table]:
    room = memory["bytes_for_sequences"]
    title = f"Sequences in {room / 1e9:.1f} GB"
    if room <= 0:
        title = f"Bytes per sequence (the weights leave no room on one {gpu}: say --memory-gb)"
    table = Table("tokens a step", "conventional", "with a snapshot per token", "replay")
    for row in memory["rows"]:
        # Plain decode needs no snapshots; conventionally, drafts cannot do without them.
        ways = ("conventional", None, "replay") if row["draft"] == 1 else (None, "snapshots", "replay")
        cells = []
        for way in ways:
            size = human_bytes(row["bytes_per_sequence"][way]) if way else ""
            cells.append(f"{row['sequences'][way]:,} × {size}" if way and row["sequences"] else size)
        table.add_row(str(row["draft"]), *cells)
    return title, table
