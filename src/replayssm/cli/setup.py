"""From what the user typed to a loaded model and a prompt."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from typing import Any

import torch

from replayssm import models

from .common import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "auto": None}

# Continued where nothing else is given: the kind of text that the model in the box knows.
BUILT_IN_PROMPT = """\
# Trait std::iter::Iterator

An interface for dealing with iterators. This is the main iterator trait.

## Required Methods

"""
SMALL = 100_000_000
"""Weights below which more than one CPU thread costs more than it brings."""


def load(name: str, dtype: str) -> tuple[Any, Any]:
    """The model and its tokenizer, without progress bars and advice: stdout and stderr are ours."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    folder = models.resolve(name)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return models.load(folder, dtype=DTYPES[dtype])


def set_threads(model: Any, threads: int | None) -> None:
    """So many CPU threads; by default one for a small model and torch's choice for others."""
    if threads is None and sum(p.numel() for p in model.parameters()) < SMALL:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def read_text(path: Path) -> str:
    """The text of a file."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a text file")
    return decode(path.read_bytes(), str(path))


def decode(data: bytes, source: str) -> str:
    """Bytes that have to be UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})") from None


def piped() -> str:
    """What was piped into the command; nothing on a terminal, from /dev/null or where stdin is closed."""
    if sys.stdin is None:
        return ""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        kind = 0  # no file behind it, such as a test's stream
    if stat.S_ISCHR(kind):
        return ""
    if os.name == "posix" and stat.S_ISFIFO(kind) and not select.select([sys.stdin], [], [], 2)[0]:
        print("Waiting for the prompt on stdin …", file=sys.stderr, flush=True)
    return decode(sys.stdin.buffer.read(), "stdin")


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """The tokens [1, N] of a prompt."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if not ids.shape[1]:
        raise UserError("the prompt is empty")
    return ids
