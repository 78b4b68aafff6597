"""The figures on a page of the docs: a table made from rows and kept between two comments, and the plots beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm.bench.cases import size_of
from replayssm.checks import ReplayError

Row = dict[str, Any]
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
# Files that ``plots`` draws.
PLOTS = {
    "kernel-speedup.png": "Tokens a second over those of the conventional step",
    "kernel-cycle.png": "A model step through a cycle",
    "kernel-roofline.png": "Bytes a second against the ceiling",
}
HEAD = (
    "| shape | batch | window | tokens | cycle, ms | step alone | conventional | ratio | of the read ceiling "
    "| slowest step / mean | fold / copy | error of the state (conventional) | commit |\n" + "|---" * 13 + "|\n"
)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table for each device, the rows by shape, tokens a step and batch."""
    found = []
    for device in dict.fromkeys(row["gpu"] for row in rows):
        mine = sorted((row for row in rows if row["gpu"] == device), key=_order)
        origin = sorted({f"{row['date']}, torch {row['torch']}, triton {row['triton']}" for row in mine})
        found.append(f"{device}; {'; '.join(origin)}:\n\n{HEAD}" + "".join(_line(row) for row in mine))
    return "\n".join(found)


def _order(row: Row) -> tuple[Any, ...]:
    size = size_of(row["shape"])
    return size.recurrence.name != "mamba2", row["shape"], row["draft"], row["precision"] != "fp32", -row["batch"]


def _line(row: Row) -> str:
    tokens = "1" if row["draft"] == 1 else f"{row['accepted']} of {row['draft']}"
    shape = row["shape"] if row["precision"] == "fp32" else f"{row['shape']}, {row['precision']}"
    cells = [
        *(shape, row["batch"], row["window"], tokens),
        *(f"{row[key]:.3g}" if row[key] < 0.1 else f"{row[key]:.3f}" for key in ("ms", "ms_step", "ms_conventional")),
        f"{row['ratio']:.2f}",
        f"{row['read_share']:.0%}",
        f"{row['slowest_over_mean']:.2f}",
        f"{row['fold_over_copy']:.2f}" if "fold_over_copy" in row else "–",
        f"{row['error']:.1e} ({row['error_conventional']:.1e})",
        row["commit"],
    ]
    return "| " + " | ".join(map(str, cells)) + " |\n"


def rewrite(page: Path, rows: Sequence[Row]) -> None:
    """Put the table of ``rows`` between the two comments of a page, and those of ``PLOTS`` that are in its folder."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ReplayError(f"{page}: expected a line {BEGIN} and a line {END}")
    images = "".join(f"![{title}]({name})\n\n" for name, title in PLOTS.items() if (page.parent / name).exists())
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n{images}{END}{after}", encoding="utf-8")
