"""RMS norms, gated or not, and gated activations: one launch for what eager code does in ten.

Between the products of a decode step these are all that is left, and a launch costs as much as their work.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """Which norm it is: models differ in these words.

    Attributes:
        size: numbers that are normalised together; a row has one or several such groups.
        eps: beside the mean square.
        offset: the weight is a difference to one.
        early: the normalised numbers are rounded to the input's dtype before the weight goes on.
        gate: "none", "before" or "after" the norm.
        act: of the gate: "silu" or "sigmoid".
    """

    size: int
    eps: float
    offset: bool = False
    early: bool = False
    gate: str = "none"
    act: str = "silu"


@triton.jit
def activation(x, ACT: tl.constexpr):
    """silu or sigmoid."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    else:
        return tl.sigmoid(x)


@triton.jit
def norm_kernel(
    x, x_stride, gate, gate_stride, weight, out, groups,
    SIZE: tl.constexpr, SHARED: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, EARLY: tl.constexpr,
    GATE: tl.constexpr, ACT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Grid: rows × groups. SHARED: all groups have one weight [SIZE]."""
    pid = tl.program_id(0)
    row = (pid // groups).to(tl.int64)
    group = pid % groups
    i = tl.arange(0, BS)
    inside = i < SIZE
    at = group * SIZE + i
    v = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + (i if SHARED else at), mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        w += 1.0
    if GATE != "none":
        z = activation(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32), ACT)
    if GATE == "before":
        v *= z
    v *= tl.rsqrt(tl.sum(v * v, 0) / SIZE + EPS)
    if EARLY:
        # The product with the weight is rounded as well, as a product of two numbers of the dtype is.
        v = (v.to(out.dtype.element_ty).to(tl.float32) * w).to(out.dtype.element_ty).to(tl.float32)
    else:
        v *= w
    if GATE == "after":
        v *= z
    tl.store(out + row * SIZE * groups + at, v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(gate, up, out, count, BS: tl.constexpr):
    """silu(gate)·up, the activation rounded as eager code rounds it."""
    at = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    g = activation(g, "silu").to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (g * u).to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, kind: Norm, gate: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x [..., width]; ``weight`` [width] or [kind.size], ``gate`` as x."""
    width = x.shape[-1]
    lines = x.flatten(0, -2) if x.stride(-1) == 1 else x.reshape(-1, width)
    gates = lines if gate is None else gate.reshape(-1, width)
    if gates.stride(-1) != 1:
        gates = gates.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups, size = width // kind.size, triton.next_power_of_2(kind.size)
    norm_kernel[(len(lines) * groups,)](
        lines, lines.stride(0), gates, gates.stride(0), weight, out, groups,
        SIZE=kind.size, SHARED=weight.numel() == kind.size, EPS=kind.eps, OFFSET=kind.offset, EARLY=kind.early,
        GATE=kind.gate, ACT=kind.act, BS=size, num_warps=max(1, min(8, size // 512)),
    )  # fmt: skip
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up of two contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    block = 1024
    gated_kernel[(triton.cdiv(gate.numel(), block),)](gate, up, out, gate.numel(), BS=block, num_warps=4)
    return out
