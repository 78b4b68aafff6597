"""The text that is read: documents one after the other, cut into rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import ReplayError


def token_rows(tokenizer: Any, documents: Sequence[str], rows: int, tokens: int) -> Tensor:
    """Token ids [rows, tokens + 1]: the documents in an order of chance that is always the same, one long text cut.

    The last token of a row is only predicted. An end-of-text token stands before each document where the tokenizer
    has one.

    Raises:
        ReplayError: there is not so much text.
    """
    order = list(documents)
    random.Random(0).shuffle(order)
    before = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    wanted = rows * (tokens + 1)
    for text in order:
        if len(ids) >= wanted:
            break
        ids += before + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < wanted:
        raise ReplayError(
            f"tokens: {rows} texts of {tokens} tokens are more than the text has ({len(ids):,} tokens in all)"
        )
    return torch.tensor(ids[:wanted]).view(rows, tokens + 1)
