"""The conventional recurrence: the state is advanced at every token, and rounded where it is kept in few bits.

What engines do without replay: a step reads the state, computes in float32 (here float64 as well, for the truth), gives
the output of the state that it just computed, and stores that state in its format, from which the next token goes on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import reference
from replayssm.integrations.transformers.scan import Scan
from replayssm.layout import Layout, Precision
from replayssm.rounding import random_bits


class Tokens(NamedTuple):
    """T tokens of B sequences in the letters of the recurrence, all in the dtype that is computed in.

    Attributes:
        q, k: [B, T, G, K], as they are used: normalised and scaled.
        v: [B, T, H, P].
        g: [B, T, H] or [B, T, H, K]; None where nothing decays.
        beta: [B, T, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor


class Loop:
    """One layer's states under the conventional recurrence.

    Attributes:
        state: [B, H, P, K], float32 or float64: what the stored state decodes to.
        count: int32 [1], tokens so far: the number of a stochastic rounding.
    """

    def __init__(
        self,
        layout: Layout,
        rows: int,
        precision: Precision,
        device: torch.device,
        seed: int = 0,
        wide: torch.dtype = torch.float32,
    ) -> None:
        """Zero states of B = ``rows`` sequences; arithmetic in ``wide``, with the oracle's gates if that is float64."""
        self.layout, self.precision, self.seed, self.wide = layout, precision, seed, wide
        self.state = torch.zeros((rows, *layout.state_shape), dtype=wide, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def run(self, scan: Scan) -> Tensor:
        """Outputs [B, T, H, P] of a call's tokens, in ``wide``."""
        tokens = self._lower(scan)
        if self.state.device.type == "cuda":
            from replayssm.drift.kernel import walk

            return walk(self, tokens)
        return walk_torch(self, tokens)

    def check(self) -> None:
        """Nothing waits to be raised."""

    def _lower(self, scan: Scan) -> Tokens:
        inputs = scan.inputs()
        if self.wide == torch.float64:
            found = reference.gates(inputs, self.layout)
        else:
            low = inputs.lower(self.layout)
            k = low.k.to(self.wide)
            found = low.q, k if low.key_scale is None else k * low.key_scale[..., None], low.v, low.g, low.beta
        parts = (None if t is None else t.to(self.wide).unflatten(0, (scan.batch, scan.count)) for t in found)
        return Tokens(*parts)  # type: ignore[arg-type]


def walk_torch(loop: Loop, tokens: Tokens) -> Tensor:
    """Advance a loop's states token by token in torch; the reference of ``kernel.walk``."""
    layout, state = loop.layout, loop.state
    share = layout.heads // layout.groups
    q, k = (t.repeat_interleave(share, 2).transpose(0, 1)[..., None, :] for t in (tokens.q, tokens.k))
    v, beta = tokens.v.transpose(0, 1), tokens.beta.transpose(0, 1)[..., None]
    decay = None
    if tokens.g is not None:
        decay = tokens.g.exp().transpose(0, 1)
        decay = decay[..., None, :] if layout.recurrence.decay == "channel" else decay[..., None, None]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for t in range(len(v)):
        if decay is not None:
            state *= decay[t]
        value = v[t]
        if layout.recurrence.update == "delta":
            value = value - (state * k[t]).sum(-1)
        state.addcmul_((beta[t] * value)[..., None], k[t])
        out[t] = (state * q[t]).sum(-1)
        loop.count += 1
        if loop.precision.checkpoint not in (torch.float32, torch.float64):
            state.copy_(rounded(state, loop))
    return out.transpose(0, 1)


def rounded(state: Tensor, loop: Loop) -> Tensor:
    """What states [B, H, P, K] decode to after they were stored in the loop's format."""
    bits, form = None, loop.precision.checkpoint_format
    if loop.precision.rounding == "stochastic":
        bits = random_bits(loop.seed, 0, loop.count, state[0].numel(), state.shape[-1])
        bits = bits.view(state.shape[1:]).expand(state.shape)
    return form.decode(form.encode(state, bits), state.shape[-1], state.dtype)
