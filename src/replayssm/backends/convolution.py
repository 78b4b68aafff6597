"""The short convolution of new tokens, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.backends.torch import Batch


def convolve(
    out: Tensor,
    ring: Tensor,
    position: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batch: Batch,
    activation: str | None,
) -> None:
    """Write the convolution of the batch's tokens into ``out`` [N, C] and their inputs into the rings.

    Args:
        out: [N, C] activation dtype.
        ring: [slots, C, width − 1 + T], the last inputs of each slot.
        position: int32 [slots], where a slot's next input goes.
        x: [N, C] inputs; weight: [C, width]; bias: [C] or None.
        batch: which rows bring which tokens.
        activation: "silu" or None.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    width, size = weight.shape[1], ring.shape[2]
    rows, tokens = batch.tokens.shape
    here = torch.arange(1 - width, tokens, device=x.device)
    places = (position[batch.slots].long()[:, None] + here) % size  # [R, width − 1 + T]
    before = ring[batch.slots[:, None], :, places[:, : width - 1]]
    line = torch.cat([before, x[batch.tokens]], 1).to(wide)  # [R, width − 1 + T, C]
    taps = _taps(batch.parents, rows, tokens, width, x.device)
    row = torch.arange(rows, device=x.device)[:, None]
    result = torch.zeros((rows, tokens, x.shape[1]), dtype=wide, device=x.device)
    for tap in range(width):
        result += line[row, taps[..., tap]] * weight[:, tap].to(wide)
    if bias is not None:
        result += bias.to(wide)
    result = (F.silu(result) if activation == "silu" else result).to(x.dtype)
    valid = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.valid is None else batch.valid
    out[batch.tokens[valid]] = result[valid]
    slot = batch.slots[:, None].expand(rows, tokens)
    ring[slot[valid], :, places[:, width - 1 :][valid]] = x[batch.tokens[valid]]


def _taps(parents: Tensor | None, rows: int, tokens: int, width: int, device: torch.device) -> Tensor:
    """Places [R, T, width] of each token's inputs among the ``width − 1`` earlier ones and the new ones, oldest first.

    A draft's inputs are itself, its path to the root, and then the earlier ones.
    """
    index = torch.arange(tokens, device=device)
    if parents is None:
        return (index[:, None] + torch.arange(width, device=device)).expand(rows, tokens, width)
    above = torch.cat([torch.arange(-1, width - 2, device=device).expand(rows, -1), parents + width - 1], 1)
    at = (index + width - 1).expand(rows, tokens)
    found = [at]
    for _ in range(width - 1):
        at = above.gather(1, at)
        found.append(at)
    return torch.stack(found[::-1], -1)
