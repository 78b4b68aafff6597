"""A plot of whole steps: milliseconds over batch, replay and conventional, a panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]
LINES = {"ms": "replay", "ms_conventional": "conventional", "ms_plain": "conventional, no drafts"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the plot of one benchmark's rows."""
    models = list(dict.fromkeys((row["model"], row["context"], row["precision"]) for row in rows))
    figure = Figure(figsize=(4.2 * len(models), 3.6), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        found = [row for row in rows if (row["model"], row["context"], row["precision"]) == model]
        found.sort(key=lambda row: row["batch"])
        for key, label in LINES.items():
            line = [(row["batch"], row[key]) for row in found if row.get(key) is not None]
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=label)
        batches = sorted({row["batch"] for row in found})
        axes.set(xlabel="batch", ylabel="ms a step", xscale="log", yscale="log")
        axes.set_title(f"{model[0]}\ncontext {model[1]}, {model[2]}", fontsize=9)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
    panels[0].legend(fontsize=8)
    figure.suptitle(f"{rows[0]['gpu']}, {rows[0]['date']}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
