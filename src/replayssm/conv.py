"""The short causal convolution in front of a recurrence, decoded and verified from its last inputs.

A slot keeps a ring of ``width − 1 + max_draft`` inputs per channel. A step writes its inputs after the committed
ones; a commit moves the place forward by what was accepted. So the convolution rolls back with the state, and nothing
moves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import checks
from replayssm.cache import CacheLayer
from replayssm.checks import ReplayError
from replayssm.rows import HostRows, Rows

ACTIVATIONS = ("silu", None)


@torch.no_grad()
def conv_step(
    layer: CacheLayer, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, activation: str | None = "silu"
) -> Tensor:
    """Convolve each row's new tokens with the inputs before them and keep them as drafts.

    Args:
        layer: ``cache[i]`` of a layout with ``conv=Conv(channels, width)``.
        x: [N, C] raw inputs in the activation dtype.
        weight: [C, width] taps, the newest last, in the activation dtype or float32.
        bias: [C] or None.
        rows: as for ``step``; for a tree, a token's earlier inputs are its ancestors.
        activation: "silu" or None.

    Returns:
        [N, C] in the activation dtype; zero for padding.

    Raises:
        ReplayError: as ``step``. Nothing was written.
    """
    if not isinstance(layer, CacheLayer):
        raise ReplayError(f"layer: expected cache[i], got {type(layer).__name__}")
    cache, layout = layer.cache, layer.cache.layout
    conv = layout.conv
    if conv is None:
        raise ReplayError("conv_step: the layout has no convolution; give it conv=Conv(channels, width)")
    checks.one_of("activation", activation, ACTIVATIONS)
    checks.shape("x", x, [("N", None), ("channels", conv.channels)], layout)
    checks.dtype("x", x, (layout.dtype,))
    checks.shape("weight", weight, [("channels", conv.channels), ("width", conv.width)], layout)
    given = [("x", x), ("weight", weight)]
    if bias is not None:
        checks.shape("bias", bias, [("channels", conv.channels)], layout)
        given.append(("bias", bias))
    for name, tensor in given:
        checks.dtype(name, tensor, (layout.dtype, torch.float32))
        checks.device(name, tensor, cache.device)
    if cache._kernels is not None:
        return cache._kernels.conv_step(layer.index, x, weight, bias, rows, activation)
    host = cache.host_rows(rows)
    if x.shape[0] < host.offsets[-1]:
        raise ReplayError(f"x: rows own {host.offsets[-1]} tokens, got N={x.shape[0]}")
    cache.expect_room(layer.index, host, kind=1)
    out = _convolve(layer, x, weight, bias, host, activation)
    cache.note_drafts(layer.index, host, kind=1)
    return out


def _convolve(
    layer: CacheLayer, x: Tensor, weight: Tensor, bias: Tensor | None, host: HostRows, activation: str | None
) -> Tensor:
    cache, layout = layer.cache, layer.cache.layout
    conv = layout.conv
    assert conv is not None
    out = torch.zeros_like(x)
    live = [r for r, (slot, count) in enumerate(zip(host.slots, host.counts, strict=True)) if slot >= 0 and count]
    if not live:
        return out
    tail = conv.width - 1
    index = torch.tensor([host.slots[r] for r in live], device=cache.device)
    ring = layer.tensors["conv"]
    before = ring[index[:, None], :, cache.ring_places(index, -tail, 0)]  # [R, width-1, C]
    # One line of inputs for all rows: the tails first, then the tokens as they came.
    line = torch.cat([before.flatten(0, 1), x]).to(layout.wide)
    taps, tokens, places = [], [], []
    for number, r in enumerate(live):
        start, count = host.offsets[r], host.counts[r]
        parents = None if host.parents is None else host.parents[start : start + count]
        taps += [_taps(t, parents, number * tail, len(live) * tail + start, conv.width) for t in range(count)]
        tokens += range(start, start + count)
        places += [(number, t) for t in range(count)]
    picked = line[torch.tensor(taps, device=cache.device)]  # [n, width, C]
    result = (picked * weight.T.to(layout.wide)).sum(1)
    if bias is not None:
        result = result + bias.to(layout.wide)
    out[tokens] = (F.silu(result) if activation == "silu" else result).to(layout.dtype)
    row, position = torch.tensor(places, device=cache.device).unbind(1)
    ring[index[row], :, cache.ring_places(index, 0, layout.max_draft)[row, position]] = x[tokens]
    return out


def _taps(token: int, parents: list[int] | None, tail_start: int, token_start: int, width: int) -> list[int]:
    """Places in the line of a token's ``width`` inputs, oldest first: its path to the root, then the tail."""
    found: list[int] = []
    while token >= 0 and len(found) < width:
        found.append(token_start + token)
        token = token - 1 if parents is None else parents[token]
    missing = width - len(found)
    return [tail_start + width - 1 - missing + i for i in range(missing)] + found[::-1]
