"""Faster training forms of functions that the stock modelling files call, as plain PyTorch that compiles in one graph.

They compute what the stock functions compute, but serve training only (no state in or out), and replace them for the
whole process. The kernels of flash-linear-attention would do as well where their backward pass is correct; with
Triton 3.4 to 3.7.0 on Hopper GPUs it refuses to run (their issue 640).
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    """Depthwise causal convolution `[B, C, T]` as a sum of shifted products, which the compiler fuses."""
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    weight = weight.to(hidden_states.dtype)
    out = padded[..., :length] * weight[:, 0, None]
    for i in range(1, width):
        out = out + padded[..., i : i + length] * weight[:, i, None]
    if bias is not None:
        out = out + bias[:, None].to(out.dtype)
    return F.silu(out) if activation in ("silu", "swish") else out


@torch.library.custom_op("replayssm_training::unit_inverse", mutates_args=())
def unit_inverse(lower: Tensor) -> Tensor:
    """Return `(I + L)⁻¹` for strictly lower triangular float32 matrices `[..., C, C]`."""
    size = lower.shape[-1]
    if not lower.is_cuda:
        eye = torch.eye(size, dtype=lower.dtype).expand_as(lower)
        return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True).contiguous()
    from inverse_kernel import launch

    return launch(lower.contiguous())


@unit_inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty_like(lower, memory_format=torch.contiguous_format)


def _save_inverse(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _differentiate_inverse(ctx: Any, gradient: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


unit_inverse.register_autograd(_differentiate_inverse, setup_context=_save_inverse)


def chunk_states(maps: Tensor, sources: Tensor) -> Tensor:
    """Solve `S[n+1] = maps[n] S[n] + sources[n]`, `S[0] = 0`, over dimension 2; return the states before each chunk.

    A scan in log2(N) batched products replaces the sequential loop over the chunks.
    """
    chunks, size = maps.shape[2], maps.shape[-1]
    joint = torch.cat([maps, sources], -1)
    reach = 1
    while reach < chunks - 1:
        later = joint[:, :, reach:, :, :size] @ joint[:, :, :-reach]
        later = torch.cat([later[..., :size], later[..., size:] + joint[:, :, reach:, :, size:]], -1)
        joint = torch.cat([joint[:, :, :reach], later], 2)
        reach *= 2
    return F.pad(joint[:, :, :-1, :, size:], (0, 0, 0, 0, 1, 0))


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Gated delta rule over `[B, T, H, D]` in chunks, parallel over the sequence."""
    if initial_state is not None or output_final_state:
        raise ValueError("the training form of the gated delta rule takes and returns no state")
    with torch.autocast(query.device.type, enabled=False):
        batch, length, heads = value.shape[:3]
        if key.shape[2] != heads:
            query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
        if extra := -length % CHUNK:
            query, key, value = (F.pad(x, (0, 0, 0, 0, 0, extra)) for x in (query, key, value))
            g, beta = (F.pad(x, (0, 0, 0, extra)) for x in (g, beta))

        def chunked(x: Tensor) -> Tensor:
            return x.float().reshape(batch, -1, CHUNK, *x.shape[2:]).transpose(2, 3).transpose(1, 2)

        q, k, v, log_decay, b = (chunked(x) for x in (query, key, value, g, beta))  # [B, H, N, C, …]
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * query.shape[-1] ** -0.5
        total = log_decay.cumsum(-1)
        future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, float("-inf")).exp()
        grown, b = total.exp()[..., None], b[..., None]
        inverse = unit_inverse((((k * b) @ k.mT) * decay).tril(-1))
        new, erased = inverse @ (v * b), inverse @ (k * b * grown)
        at_end = (k * (total[..., -1:] - total).exp()[..., None]).mT
        eye = torch.eye(k.shape[-1], device=q.device)
        maps = grown[..., -1:, :] * eye - at_end @ erased
        states = chunk_states(maps, at_end @ new)
        written = new - erased @ states
        out = (q * grown) @ states + ((q @ k.mT) * decay) @ written
        out = out.transpose(1, 2).transpose(2, 3).reshape(batch, -1, heads, v.shape[-1])[:, :length]
    return out.to(value.dtype), None


def install(model: nn.Module) -> list[str]:
    """Replace the functions of the modelling file of `model`; return the names of those replaced."""
    module = sys.modules[type(model).__module__]
    replacements: dict[str, Callable] = {
        "causal_conv1d_fn": causal_conv1d,
        "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    }
    names = [name for name in replacements if hasattr(module, name)]
    for name in names:
        setattr(module, name, replacements[name])
    return names
