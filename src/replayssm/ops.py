"""``step``: the outputs of new tokens, from the checkpoint and the buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm import compiled
from replayssm.cache import CacheLayer
from replayssm.checks import ReplayError
from replayssm.inputs import Inputs
from replayssm.rows import Rows


@torch.no_grad()
def step(layer: CacheLayer, inputs: Inputs, rows: Rows) -> Tensor:
    """Decode or verify: compute the outputs of each row's new tokens and append them to the buffer as drafts.

    The committed state does not change, so repeating a step is safe. ``cache.commit(rows, accepted)`` says how many of
    the tokens became part of the sequence.

    Args:
        layer: ``cache[i]``.
        inputs: N tokens, in the layout's recurrence (``Mamba2Inputs``, ``GdnInputs``, ``KdaInputs``, ``LinearInputs``).
        rows: which slots they belong to; 0…max_draft tokens a row, a chain or a tree.

    Returns:
        [N, heads, head_dim] in ``layout.dtype``; zero for padding rows and for tokens at or past ``offsets[-1]``.

    Raises:
        ReplayError: a shape, dtype, device, slot or count that does not fit, or a row whose earlier drafts were
            neither committed nor dropped. Nothing was written.
    """
    if torch.compiler.is_compiling():
        return compiled.step(layer.cache, layer.index, inputs, rows)
    if not isinstance(layer, CacheLayer):
        raise ReplayError(f"layer: expected cache[i], got {type(layer).__name__}")
    if not hasattr(inputs, "lower"):
        raise ReplayError(
            f"inputs: expected Mamba2Inputs, GdnInputs, KdaInputs or LinearInputs, got {type(inputs).__name__}"
        )
    cache, layout = layer.cache, layer.cache.layout
    inputs.check(layout, cache.device)
    return cache.verbs.step(layer.index, inputs, rows)


compiled.eager["step"] = step
