"""The short causal convolution in front of a recurrence, decoded and verified from its last inputs.

A slot keeps a ring of ``width − 1 + max_draft`` inputs per channel. A step writes its inputs after the committed
ones; a commit moves the place forward by what was accepted. So the convolution rolls back with the state, and nothing
moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm import checks, compiled
from replayssm.cache import CacheLayer
from replayssm.checks import ReplayError
from replayssm.rows import Rows

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
    if torch.compiler.is_compiling():
        return compiled.conv_step(layer.cache, layer.index, x, weight, bias, rows, activation)
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
    return cache.verbs.conv_step(layer.index, x, weight, bias, rows, activation)


compiled.eager["conv_step"] = conv_step
