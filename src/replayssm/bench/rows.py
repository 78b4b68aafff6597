"""Rows of a benchmark: JSON lines, each with where, when and from which commit it was measured."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from replayssm.checks import ReplayError

Row = dict[str, Any]
# What a figure is of: two rows that agree in these are the same figure, and the later one counts.
IDENTITY = ("shape", "batch", "window", "draft", "accepted", "precision", "gpu")


def provenance(device: str, commit: str = "") -> Row:
    """Device, date, versions and commit; ``commit`` where the package is in no checkout."""
    return {
        "gpu": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit or checkout(),
    }


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def checkout() -> str:
    """The checkout's commit, with ``-dirty`` after it where tracked files differ; empty outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def append(path: Path, row: Row) -> None:
    """Add a row to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read(paths: Iterable[Path]) -> list[Row]:
    """The figures of files of JSON lines, the newest of each; rows of sweeps and ceilings are left out.

    So are figures of a window where the same case was measured with another on a later day.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ReplayError(f"{path}:{number}: no JSON ({error.msg})") from None
            if isinstance(row, dict) and "ms_conventional" in row and "sweep" not in row and "ratio" in row:
                key = tuple(row.get(name) for name in IDENTITY)
                found.pop(key, None)
                found[key] = row
    days: dict[tuple[Any, ...], str] = {}
    for row in found.values():
        days[_case(row)] = max(days.get(_case(row), ""), row.get("date", ""))
    return [row for row in found.values() if row.get("date", "") == days[_case(row)]]


def _case(row: Row) -> tuple[Any, ...]:
    """What a row measures, whatever its window."""
    return tuple(row.get(name) for name in IDENTITY if name != "window")
