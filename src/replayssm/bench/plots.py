"""Plots of rows, as PNG: speed-up over batch, time of each step of a cycle, and bytes a second against the ceiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replayssm.bench.cases import SHAPES, name_of

Row = dict[str, Any]
# Kinds of cases that the plots tell apart, by precision and tokens a step.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the plots that the rows have data for into ``folder``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    return [path for plot in (speedup, cycle, roofline) if (path := plot(rows, folder)) is not None]


def speedup(rows: Sequence[Row], folder: Path) -> Path | None:
    """Tokens a second over those of the conventional step: of plain decode and drafts by batch, of other precisions."""
    wide = [row for row in rows if row["precision"] == "fp32"]
    panels = {
        "plain decode": [row for row in wide if row["draft"] == 1],
        "drafts": [row for row in wide if row["draft"] > 1],
        "other precisions": [row for row in rows if row["precision"] != "fp32"],
    }
    panels = {title: found for title, found in panels.items() if found}
    if not panels:
        return None
    figure = _figure(rows, "Tokens a second, over the conventional one-token step", len(panels))
    for axes, (title, found) in zip(figure.axes, panels.items(), strict=True):
        other = title == "other precisions"
        for label, line in _groups(found, _kind if other else _series):
            line = sorted(line, key=lambda row: row["batch"])
            gain = [row["ratio"] * row["accepted"] for row in line]
            places = [row["precision" if other else "batch"] for row in line]
            axes.plot(places, gain, label=label, **_style(line[0], linestyle="" if other else "-"))
        axes.set_title(title, fontsize=9)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.legend(fontsize=6)
        if other:
            axes.tick_params(axis="x", rotation=30)
        else:
            batches = sorted({row["batch"] for row in found})
            axes.set_xlabel("batch")
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(batch) for batch in batches])
    # The panels share their axis; room for the legends is above.
    figure.axes[0].set_ylim(0, 1.5 * max(row["ratio"] * row["accepted"] for row in rows))
    return _save(figure, folder / "kernel-speedup.png")


def cycle(rows: Sequence[Row], folder: Path) -> Path | None:
    """Milliseconds of each model step of a cycle: folds staggered, and all rows folding together at its end."""
    found = [row for row in rows if row.get("aligned") and row["draft"] == 1 and row["precision"] == "fp32"]
    largest = {shape: max(group, key=lambda row: row["batch"]) for shape, group in _groups(found, lambda r: r["shape"])}
    if not largest:
        return None
    figure = _figure(rows, "A layer's model step through a cycle, ms", len(largest))
    for axes, row in zip(figure.axes, largest.values(), strict=True):
        style = _style(row, marker=".")
        axes.plot(row["by_step"], label="folds staggered", **style)
        axes.plot(row["aligned"], label="all rows fold together", **_style(row, marker=".", linestyle="--", alpha=0.6))
        axes.axhline(row["ms_conventional"], color="black", linewidth=0.8, linestyle=":", label="conventional")
        axes.set(title=f"{row['shape']}\nbatch {row['batch']}", xlabel="step of the cycle")
        axes.title.set_fontsize(8)
    figure.axes[0].legend(fontsize=7)
    figure.axes[0].set_ylim(0)  # of all panels; set with the first one, it would cut the others' folds off
    return _save(figure, folder / "kernel-cycle.png")


def roofline(rows: Sequence[Row], folder: Path) -> Path | None:
    """Bytes a second that a model step moves, by the bytes that it has to move; the line is the measured ceiling."""
    found = [row for row in rows if row.get("bytes")]
    if not found:
        return None
    figure = _figure(rows, "Bytes a second of a layer's model step", 1)
    (axes,) = figure.axes
    for label, points in _groups(found, _kind):
        speed = [row["bytes"] / row["ms"] / 1e9 for row in points]
        axes.plot([row["bytes"] / 1e6 for row in points], speed, label=label, **_style(points[0], linestyle=""))
    ceiling = max(row["read_tb_s"] for row in found)
    axes.axhline(ceiling, color="black", linewidth=0.8, label=f"reading alone: {ceiling:.3g} TB/s")
    axes.set(xlabel="MB that a layer's step has to move, a fold's share included", ylabel="TB/s", ylim=(0, None))
    axes.set_xscale("log")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, folder / "kernel-roofline.png")


def _groups(rows: Sequence[Row], key: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


def _series(row: Row) -> str:
    """What a line of a plot is of: a case without its batch."""
    return name_of(row).replace(f"/b{row['batch']}", "").replace("/", ", ").removesuffix(", fp32")


def _kind(row: Row) -> str:
    """Shape and tokens a step, or that the precision is another one: what ``_style`` tells apart."""
    tokens = "plain" if row["draft"] == 1 else f"{row['accepted']} of {row['draft']} tokens"
    return f"{row['shape']}, {tokens if row['precision'] == 'fp32' else 'other precisions'}"


def _style(row: Row, **more: Any) -> dict[str, Any]:
    """A colour for the shape, a marker for the tokens a step and the precision, and ``more`` over them."""
    names = list(SHAPES)
    place = names.index(row["shape"]) if row["shape"] in names else len(names)
    kind = {1: 0, 4: 1, 8: 2}.get(row["draft"], 3) if row["precision"] == "fp32" else 4
    return {"color": f"C{place}", "marker": MARKERS[kind], "markersize": 5, "linewidth": 1.2, **more}


def _figure(rows: Sequence[Row], title: str, panels: int) -> Figure:
    """A figure whose title says where its rows come from."""
    figure = Figure(figsize=(min(12, 3 + 3 * panels + (3 if panels == 1 else 0)), 4.5), dpi=100, layout="constrained")
    figure.subplots(1, panels, sharey=True)
    origin = sorted({f"{row['gpu']}, {row['date']}, {row['commit']}" for row in rows})
    figure.suptitle(f"{title}\n{'; '.join(origin[:3])}{' …' if len(origin) > 3 else ''}", fontsize=9)
    for axes in figure.axes:
        _plain(axes)
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Software": None})
    return path
