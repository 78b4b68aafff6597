"""The oracle: the token loop in float64, gates included. Written for reading, used by tests and ``replayssm check``.

Nothing here is shared with the backends, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.inputs import GdnInputs, Inputs, KdaInputs, LinearInputs, Mamba2Inputs
from replayssm.layout import Layout


def gates(
    inputs: Inputs, layout: Layout, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return q [N,G,K], k [N,G,K], v [N,H,P], g ([N,H], [N,H,K] or None) and β [N,H], all in ``dtype``."""

    def up(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    def softplus(x: Tensor) -> Tensor:
        return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))

    def unit(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    if isinstance(inputs, Mamba2Inputs):
        dt = softplus(up(inputs.dt) + (0 if inputs.dt_bias is None else up(inputs.dt_bias)))
        if inputs.dt_limit is not None:
            dt = dt.clamp(*inputs.dt_limit)
        return up(inputs.C), up(inputs.B), up(inputs.x), up(inputs.A) * dt, dt
    if isinstance(inputs, LinearInputs):
        beta = torch.ones_like(up(inputs.v)[..., 0]) if inputs.beta is None else up(inputs.beta)
        q, k = up(inputs.q), up(inputs.k)
        if inputs.unit:
            q, k = unit(q) * layout.state_dim**-0.5, unit(k)
        return q, k, up(inputs.v), None if inputs.g is None else up(inputs.g), beta
    assert isinstance(inputs, GdnInputs | KdaInputs)
    q, k = unit(up(inputs.q)) * layout.state_dim**-0.5, unit(up(inputs.k))
    beta = 1 / (1 + torch.exp(-up(inputs.b)))
    rate, raw = torch.exp(up(inputs.A_log)), up(inputs.a) + up(inputs.dt_bias)
    if isinstance(inputs, GdnInputs):
        return q, k, up(inputs.v), -rate * softplus(raw), beta * (2 if inputs.allow_neg_eigval else 1)
    rate = rate[:, None]
    if inputs.lower_bound is None:
        return q, k, up(inputs.v), -rate * softplus(raw), beta
    return q, k, up(inputs.v), inputs.lower_bound / (1 + torch.exp(-rate * raw)), beta


def token_loop(
    layout: Layout,
    inputs: Inputs,
    state: Tensor,
    parents: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Run one sequence token by token.

    Args:
        layout: names the recurrence and its sizes.
        inputs: N tokens of this one sequence.
        state: [H, P, K] before the first token.
        parents: for a tree of drafts, each token's parent (−1: the state before); None is a chain.
        dtype: of the arithmetic.

    Returns:
        The outputs [N, H, P] and the state after each token [N, H, P, K], in ``dtype``.
    """
    q, k, v, g, beta = gates(inputs, layout, dtype)
    repeat = layout.heads // layout.groups
    outputs, states = [], []
    for n in range(inputs.tokens):
        parent = n - 1 if parents is None else parents[n]
        S = state.to(dtype) if parent < 0 else states[parent]
        q_n, k_n = q[n].repeat_interleave(repeat, 0), k[n].repeat_interleave(repeat, 0)
        if g is not None:
            decay = torch.exp(g[n])
            S = S * (decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])
        value = v[n]
        if layout.recurrence.update == "delta":
            value = value - torch.einsum("hpk,hk->hp", S, k_n)
        S = S + torch.einsum("h,hp,hk->hpk", beta[n], value, k_n)
        outputs.append(torch.einsum("hpk,hk->hp", S, q_n))
        states.append(S)
    if not outputs:
        shape = (0, layout.heads, layout.head_dim)
        return state.new_zeros(shape, dtype=dtype), state.new_zeros((*shape, layout.state_dim), dtype=dtype)
    return torch.stack(outputs), torch.stack(states)


def causal_conv(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Depthwise causal convolution of one sequence, tap by tap, in float64.

    Args:
        x: [N, C]; tail: [C, width-1] the inputs before x, oldest first; weight: [C, width]; bias: [C] or None.
        activation: "silu" or None.

    Returns:
        [N, C] in float64.
    """
    whole = torch.cat([tail.T.double(), x.double()])
    width = weight.shape[1]
    out = torch.zeros_like(x, dtype=torch.float64)
    for n in range(x.shape[0]):
        for tap in range(width):
            out[n] += whole[n + tap] * weight[:, tap].double()
    if bias is not None:
        out = out + bias.double()
    return out / (1 + torch.exp(-out)) if activation == "silu" else out
