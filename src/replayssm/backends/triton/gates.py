"""Gates and norms: one device function each, so that two kernels cannot use two formulas for one gate."""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_or(pointer, offset, mask, default):
    """Load float32 numbers; ``default`` where the mask is off or the tensor is absent (None)."""
    if pointer is None:
        return (offset * 0).to(tl.float32) + default
    else:
        return tl.load(pointer + offset, mask=mask, other=default).to(tl.float32)


@triton.jit
def fall(exponent, S: tl.constexpr):
    """exp, zero where it is no normal number: that spares many columns the test for it."""
    if S.arch > 0:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=r,r",
            [exponent * 1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp(exponent)


@triton.jit
def softplus(x):
    """log(1 + exp x), the identity above 20.

    max(x, 0) + log1p(exp(−|x|)), with log1p(y) = 2·atanh(y / (2 + y)) as a series: y / (2 + y) ≤ 1/3. A plain log of
    1 + y loses the digits of a small step size.
    """
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    w = z * z
    series = 1.0 / 13 + w * (1.0 / 15 + w * (1.0 / 17))
    series = 1.0 / 7 + w * (1.0 / 9 + w * (1.0 / 11 + w * series))
    series = 1.0 + w * (1.0 / 3 + w * (1.0 / 5 + w * series))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def gates(a, b, rate, bias, low, high, S: tl.constexpr):
    """Log-decay and write weight from raw gates, in float32.

    ``low`` and ``high`` are the gate's own numbers: the limits of Mamba-2's step size; the lower bound of a bounded
    decay and the factor of σ(b).
    """
    if S.gate == "mamba2":
        dt = tl.minimum(tl.maximum(softplus(a + bias), low), high)
        return rate * dt, dt
    elif S.gate == "softplus":
        return -tl.exp(rate) * softplus(a + bias), tl.sigmoid(b) * high
    elif S.gate == "bounded":
        return low * tl.sigmoid(tl.exp(rate) * (a + bias)), tl.sigmoid(b) * high
    else:
        return a, b


@triton.jit
def gate_inputs(inputs, strides, token, valid, head):
    """What the gates of a head are computed from, loaded: for tokens and heads that broadcast."""
    at_head = token * 0 + head
    a = load_or(inputs.a, token * strides.a + head, valid, 0.0)
    b = load_or(inputs.b, token * strides.b + head, valid, 1.0)
    rate = load_or(inputs.rate, at_head, valid, 0.0)
    bias = load_or(inputs.bias if inputs.channels is None else None, at_head, valid, 0.0)
    return a, b, rate, bias


@triton.jit
def head_gates(inputs, raw, valid, low, high, S: tl.constexpr):
    """g and β of the new tokens from ``gate_inputs``; g = 0 where no decay per head exists."""
    g, beta = gates(raw[0], raw[1], raw[2], raw[3], low, high, S)
    if inputs.a is None:
        g = tl.zeros_like(beta)
    return tl.where(valid, g, 0.0), tl.where(valid, beta, 0.0)


@triton.jit
def channel_gates(inputs, strides, token, inside, head, columns, low, high, S: tl.constexpr):
    """g of the new tokens where the decay is per channel; ``token`` and ``columns`` broadcast to its shape."""
    channel = head * S.K + columns
    a = load_or(inputs.channels, token * strides.channels + channel, inside, 0.0)
    rate = load_or(inputs.rate, (token + columns) * 0 + head, inside, 0.0)
    bias = load_or(inputs.bias, token * 0 + channel, inside, 0.0)
    g, _ = gates(a, a, rate, bias, low, high, S)
    return tl.where(inside, g, 0.0)


@triton.jit
def unit_scales(qq, kk, S: tl.constexpr):
    """What q and k are multiplied by, given their squared lengths."""
    if S.unit:
        return tl.rsqrt(qq + 1e-6) * (S.K**-0.5), tl.rsqrt(kk + 1e-6)
    else:
        return tl.zeros_like(qq) + 1.0, tl.zeros_like(kk) + 1.0
