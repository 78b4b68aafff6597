"""A Triton kernel that inverts many small unit lower triangular matrices."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _invert(lower, out, SIZE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    offsets = tl.arange(0, SIZE)
    square = base + offsets[:, None] * SIZE + offsets[None, :]
    # Row i of the inverse less the identity is −L[i] (I + the rows above): forward substitution, row by row
    result = -tl.load(lower + square)
    for i in range(1, SIZE):
        row = -tl.load(lower + base + i * SIZE + offsets)
        row += tl.sum(row[:, None] * result, axis=0)
        result = tl.where(offsets[:, None] == i, row[None, :], result)
    tl.store(out + square, result + (offsets[:, None] == offsets[None, :]).to(tl.float32))


def launch(lower: Tensor) -> Tensor:
    """Return `(I + L)⁻¹` of contiguous strictly lower triangular float32 matrices `[..., C, C]`."""
    size = lower.shape[-1]
    out = torch.empty_like(lower)
    _invert[(lower.numel() // size**2,)](lower, out, SIZE=size)  # pyright: ignore[reportArgumentType]
    return out
