"""Error over length, one line a policy: logarithmic both ways, top-1 agreement beside it, a pair of panels a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replayssm.drift.rows import Row, is_reference

COLOURS = {
    "bf16": "tab:gray",
    "fp16": "tab:blue",
    "fp8": "tab:orange",
    "fp8_e5m2": "tab:pink",
    "int8": "tab:green",
    "int4": "tab:purple",
    "nvfp4": "tab:red",
}
LINES: dict[str, Any] = {"exact": "-", "rounded every token": ":", "rounded every window": "--", "read rounded": "-"}
MARKS: dict[str, Any] = {"exact": "", "rounded every token": "^", "rounded every window": "s", "read rounded": "o"}
LABELS = {
    "exact": "float32",
    "rounded every token": "recurrence, rounded every token",
    "rounded every window": "recurrence, rounded once a window",
    "read rounded": "float32 recurrence, rounded reads",
}


def draw(rows: list[Row], path: Path) -> None:
    """Store a picture of rows; its kind by the file's name (.png, .svg, .pdf)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(len(models), 2, figsize=(11, 4.6 * len(models) + 0.5), dpi=120, squeeze=False)
    for (left, right), model in zip(panels, models, strict=True):
        shown = [row for row in rows if row["model"] == model and not is_reference(row)]
        for row in shown:
            style = _style(row)
            left.plot(row["positions"], [v if v > 0 else float("nan") for v in row["kl"]], **style)
            right.plot(row["positions"], [100 * v for v in row["agreement"]], **style)
        first = shown[0] if shown else rows[0]
        title = f"{model} ({', '.join(first['recurrences'])}), {first['texts']} × {first['tokens']:,} tokens"
        left.set(xscale="log", yscale="log", title=title, ylabel="KL from conventional float32, nats")
        right.set(xscale="log", title="likeliest token as conventional float32", ylabel="% of tokens")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("tokens read")
            axes.grid(alpha=0.3)
    figure.legend(handles=_legend(rows), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.9 / (4.6 * len(models) + 0.5), 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _style(row: Row) -> dict[str, Any]:
    """Colour by format, line by what is rounded."""
    kind, form = row["kind"], row["format"]
    colour = "black" if kind == "exact" else COLOURS.get(form.removesuffix("sr"), "tab:brown")
    style = {"color": colour, "linestyle": LINES[kind], "marker": MARKS[kind], "markersize": 3.5, "linewidth": 1.3}
    return {**style, "markerfacecolor": "white" if form.endswith("sr") else colour}


def _legend(rows: list[Row]) -> list[Any]:
    from matplotlib.lines import Line2D

    formats = {row["format"].removesuffix("sr"): _style(row)["color"] for row in rows if row["kind"] != "exact"}
    kinds = [kind for kind in LABELS if any(row["kind"] == kind and not is_reference(row) for row in rows)]
    shown = [Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in formats.items()]
    for kind in kinds:
        shown.append(Line2D([], [], color="black", linestyle=LINES[kind], marker=MARKS[kind], label=LABELS[kind]))
    if any(row["format"].endswith("sr") for row in rows):
        label = "open mark: stochastic rounding"
        shown.append(Line2D([], [], color="black", marker="s", markerfacecolor="white", linestyle="", label=label))
    return shown
