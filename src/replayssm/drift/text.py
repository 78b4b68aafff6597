"""The text that is read: pieces of documents in an order of chance, so that no length has a text of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import ReplayError

PIECE = 512
"""Tokens of a document that stay together."""


def token_rows(tokenizer: Any, documents: Sequence[str], rows: int, tokens: int) -> Tensor:
    """Token ids [rows, tokens + 1] of real text; the last token of a row is only predicted.

    An end-of-text token stands before each document where the tokenizer has one. Documents are cut into pieces, which
    come in an order that is always the same. Whole documents would make some lengths easy and others hard: one of them
    may fill half of a row.

    Raises:
        ReplayError: there is not so much text.
    """
    before = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces: list[list[int]] = []
    for text in documents:
        ids = before + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        pieces += [ids[i : i + PIECE] for i in range(0, len(ids), PIECE)]
    random.Random(0).shuffle(pieces)
    found = [token for piece in pieces for token in piece]
    wanted = rows * (tokens + 1)
    if len(found) < wanted:
        raise ReplayError(
            f"tokens: {rows} texts of {tokens:,} tokens are more than there is: {len(found):,} tokens in all"
        )
    return torch.tensor(found[:wanted]).view(rows, tokens + 1)
