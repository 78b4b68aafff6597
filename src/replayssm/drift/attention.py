"""Attention over long texts: causal, of the last tokens only, in blocks.

A model that was trained on short contexts has no use for keys further back, and its text would get worse with every
position for a reason that is not the one measured. So queries see what they saw in training.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from replayssm.checks import ReplayError

BLOCK = 512
"""Queries that share a mask: memory grows with this times the keys that they see."""


def implementation(last: int | None) -> str:
    """The name under which transformers finds causal attention to the ``last`` tokens (None: to all)."""
    name = f"replayssm_last_{last or 'all'}"
    AttentionInterface.register(name, partial(attend, last=last))
    return name


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    last: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, heads, T, D], key and value [B, groups, S, ·]; queries are the last tokens.

    Returns:
        [B, T, heads, width of a value], and no weights.

    Raises:
        ReplayError: the model's attention does something that this does not.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ReplayError(f"drift: attention with {name} is not supported")
    if attention_mask is not None:
        raise ReplayError("drift: attention with a mask of its own is not supported")
    heads, tokens = query.shape[1:3]
    before = key.shape[2] - tokens
    reach = min(n for n in (last, sliding_window, key.shape[2]) if n is not None)
    if heads != key.shape[1]:
        key, value = (t.repeat_interleave(heads // key.shape[1], 1) for t in (key, value))
    out = []
    for start in range(0, tokens, BLOCK):
        stop = min(tokens, start + BLOCK)
        first = max(0, before + start + 1 - reach)
        here = torch.arange(before + start, before + stop, device=query.device)[:, None]
        there = torch.arange(first, before + stop, device=query.device)
        seen = slice(first, before + stop)
        mask = (there <= here) & (there > here - reach)
        part = query[:, :, start:stop], key[:, :, seen], value[:, :, seen]
        out.append(F.scaled_dot_product_attention(*part, attn_mask=mask, scale=scaling))
    return torch.cat(out, 2).transpose(1, 2), None
