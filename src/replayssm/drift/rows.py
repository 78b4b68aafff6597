"""From sums to rows: one for each policy of a run, as they are stored, printed and drawn."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from replayssm.checks import ReplayError
from replayssm.drift.policies import REFERENCE

if TYPE_CHECKING:
    from replayssm.drift.measure import Drift

Row = dict[str, Any]
"""One policy on one model. Lists go along ``positions``:

kl (nats), kl_error (standard error of that mean, tokens taken as independent), agreement, nll (nats), layers (place in
the model -> relative output error against float64). ``slope`` is that of log kl over log position from ``fit_from`` on,
``perplexity`` and ``top1`` are over the whole text.
"""

KEYS = ("benchmark", "model", "policy", "kind", "positions", "kl", "agreement", "slope", "perplexity")
OCTAVES, FILLED = 7, 512
"""The slope is fitted over so many octaves before the end, but not before states are full of what they remember."""


def rows_of(drift: Drift, model: str) -> list[Row]:
    """The rows of a measurement."""
    bins, n = drift.bins, drift.texts
    count = torch.tensor(bins.counts, dtype=torch.float64) * n
    kl, agreement, nll = (sums.per_bin() / count for sums in (drift.kl, drift.agreement, drift.nll))
    spread = (drift.kl_squares.per_bin() / count - kl.square()).clamp(min=0)
    errors = {i: (a.per_bin() / b.per_bin()).sqrt() for i, (a, b) in drift.errors.items()}
    whole = drift.nll.total() / (drift.tokens * n), drift.agreement.total() / (drift.tokens * n)
    fit_from = max(FILLED, drift.tokens >> OCTAVES)
    common = where(drift) | {
        "benchmark": "drift",
        "model": model,
        "recurrences": sorted(set(drift.recurrences.values())),
    }
    found = []
    for i, policy in enumerate(drift.policies):
        slope, error = fit(bins.positions, kl[i].tolist(), fit_from)
        found.append(
            common
            | {
                "policy": policy.name,
                "kind": policy.kind,
                "format": policy.format,
                "positions": bins.positions,
                "counts": [int(c) for c in count],
                "kl": kl[i].tolist(),
                "kl_error": (spread[i] / count).sqrt().tolist(),
                "agreement": agreement[i].tolist(),
                "nll": nll[i].tolist(),
                "slope": slope,
                "slope_error": error,
                "fit_from": fit_from,
                "perplexity": float(whole[0][i].exp()),
                "top1": float(whole[1][i]),
                "layers": {str(layer): error[i].tolist() for layer, error in errors.items()},
            }
        )
    return found


def where(drift: Drift) -> Row:
    """What was run, and on what."""
    import transformers

    import replayssm

    cuda = drift.device.type == "cuda"
    return {
        "tokens": drift.tokens,
        "texts": drift.texts,
        "window": drift.window,
        "step_tokens": drift.step_tokens,
        "chunk": drift.chunk,
        "attention": drift.attention,
        "dtype": str(next(drift.model.parameters()).dtype).removeprefix("torch."),
        "seed": drift.seed,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "replayssm": replayssm.__version__,
    }


def fit(positions: list[int], values: list[float], start: int) -> tuple[float | None, float | None]:
    """Slope of log value over log position from ``start`` on by least squares, and its standard error.

    None where fewer than three values are positive.
    """
    pairs = [(log(p), log(v)) for p, v in zip(positions, values, strict=True) if p >= start and v > 0]
    if len(pairs) < 3:
        return None, None
    mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in pairs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / square
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in pairs)
    return slope, (rest / (len(pairs) - 2) / square) ** 0.5


def comparisons(rows: list[Row]) -> list[Row]:
    """For each model and format: the end's KL where the state is rounded, in units of that where only reads are.

    A line's other keys are kinds, with ", sr" where rounding is stochastic.
    """
    found = []
    for row in rows:
        if row["kind"] != "read rounded" or not row["kl"][-1]:
            continue
        line: Row = {"model": row["model"], "format": row["format"], "read": row["kl"][-1]}
        for other in rows:
            form, rounding = other["format"].removesuffix("sr"), ", sr" if other["format"].endswith("sr") else ""
            if (other["model"], form) == (row["model"], row["format"]) and other is not row:
                line[other["kind"] + rounding] = other["kl"][-1] / row["kl"][-1]
        found.append(line)
    return found


def write(path: Path, rows: Iterable[Row]) -> None:
    """Store rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of files.

    Raises:
        ReplayError: a line that is none.
    """
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or any(key not in row for key in KEYS):
                raise ReplayError(f"{path}: line {number} is no row of `replayssm drift`")
            found.append(row)
    if not found:
        raise ReplayError("no rows to show")
    return found


def is_reference(row: Row) -> bool:
    """Whether a row is that of the run that all others are compared with."""
    return row["policy"] == REFERENCE.name
