"""``step``: the outputs of new tokens, from the checkpoint and the buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.torch import Batch
from replayssm.cache import CacheLayer, ReplayCache
from replayssm.checks import ReplayError
from replayssm.inputs import Inputs
from replayssm.rows import HostRows, Rows


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
    if not isinstance(layer, CacheLayer):
        raise ReplayError(f"layer: expected cache[i], got {type(layer).__name__}")
    if not hasattr(inputs, "lower"):
        raise ReplayError(
            f"inputs: expected Mamba2Inputs, GdnInputs, KdaInputs or LinearInputs, got {type(inputs).__name__}"
        )
    cache, layout = layer.cache, layer.cache.layout
    if cache._kernels is not None:
        inputs.check(layout, cache.device)
        return cache._kernels.step(layer.index, inputs, rows)
    host = cache.host_rows(rows)
    inputs.check(layout, cache.device)
    if inputs.tokens < host.offsets[-1]:
        raise ReplayError(f"inputs: rows own {host.offsets[-1]} tokens, got N={inputs.tokens}")
    cache.expect_room(layer.index, host)
    batch = batch_of(cache, host)
    if batch is None:
        shape = (inputs.tokens, layout.heads, layout.head_dim)
        out = torch.zeros(shape, dtype=layout.dtype, device=cache.device)
    else:
        out = cache.backend.step(layer.tensors, layout, inputs, batch)
    cache.note_drafts(layer.index, host)
    return out


def batch_of(cache: ReplayCache, host: HostRows) -> Batch | None:
    """The rows that bring tokens, as the backend wants them; None where there are none."""
    live = [r for r, (slot, count) in enumerate(zip(host.slots, host.counts, strict=True)) if slot >= 0 and count]
    if not live:
        return None
    counts = [host.counts[r] for r in live]
    most = max(counts)
    places = [[host.offsets[r] + min(t, n - 1) for t in range(most)] for r, n in zip(live, counts, strict=True)]
    device = cache.device
    valid = parents = None
    if min(counts) != most:
        valid = torch.tensor([[t < n for t in range(most)] for n in counts], device=device)
    if host.parents is not None and most > 1:
        lines = [[host.parents[place] for place in line] for line in places]
        parents = torch.tensor(lines, device=device)
        if valid is not None:
            parents = torch.where(valid, parents, -1)
    slots = torch.tensor([host.slots[r] for r in live], device=device)
    length = cache.length[slots].long()
    return Batch(slots, length, torch.tensor(places, device=device), valid, parents, int(length.max()))
