"""What the commands share: one-line errors with exit code 2, JSON on stdout, numbers for people."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from replayssm.checks import ReplayError

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """Something that the user can put right; the message says what, in one line."""


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Make a typer command print expected errors as one line on stderr and exit with code 2, without a traceback."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (UserError, ReplayError, FileNotFoundError) as error:
            print(f"error: {_line(error)}", file=sys.stderr)
            raise typer.Exit(code=2) from None

    return run


def _line(error: Exception) -> str:
    """The message in one line. The system's own `FileNotFoundError` starts with a number; the file's name says more."""
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"no such file: {error.filename}"
    return " ".join(str(error).split())


def console() -> Console:
    """Where tables go: stdout, with colour only on a terminal. Made anew so that a redirected stdout is respected."""
    return Console(highlight=False, soft_wrap=False)


def print_json(obj: Any) -> None:
    """One JSON document on stdout. NaN and infinity are refused: they are not JSON."""
    print(json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False))


def human_bytes(count: float) -> str:
    """Bytes with a binary unit: 4194304 -> "4.00 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def human_time(seconds: float) -> str:
    """Seconds with a fitting unit: 0.000523 -> "0.523 ms"."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3f} ms"
        if seconds >= 1e-4
        else f"{seconds * 1e6:.1f} µs"
    )
