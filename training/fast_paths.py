"""Faster training forms of functions that the stock modelling files call, as plain PyTorch that compiles in one graph.

They compute what the stock functions compute, but serve training only (no state in or out), and replace them for the
whole process. The kernels of flash-linear-attention would do as well where their backward pass is correct; with
Triton 3.4 to 3.7.0 on Hopper GPUs it refuses to run (their issue 640).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
NEAR = 16  # tokens between which every channel's decay is computed pair by pair


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


def split(x: Tensor) -> Tensor:
    """`[B, T, H, …]` -> `[B, H, N, CHUNK, …]`, the last chunk filled with zeros, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).transpose(2, 3).transpose(1, 2)


def join(x: Tensor, length: int) -> Tensor:
    """`[B, H, N, CHUNK, D]` -> `[B, T, H, D]`."""
    return x.transpose(1, 2).transpose(2, 3).flatten(1, 2)[:, :length]


def unit(x: Tensor) -> Tensor:
    """Vectors divided by their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def upper(size: int, device: torch.device) -> Tensor:
    """Which entries `[size, size]` would let a token see a later one."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, b: Tensor, total: Tensor, products: tuple[Tensor, Tensor]) -> Tensor:
    """Delta rule over chunks, parallel over the sequence.

    Args:
        q, k, v: `[B, H, N, C, D]`; b: `[B, H, N, C, 1]`.
        total: log-decays summed from the start of each chunk, `[B, H, N, C, D]` or `[B, H, N, C, 1]`.
        products: of q with k and of k with k, decayed from one token to the other: `[B, H, N, C, C]`, zero above.
    """
    read, overlap = products
    grown, last = total.exp(), total[..., -1:, :]
    inverse = unit_inverse((overlap * b).tril(-1))
    new, erased = inverse @ (v * b), inverse @ (k * b * grown)
    at_end = (k * (last - total).exp()).mT
    eye = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    maps = last.exp() * eye - at_end @ erased
    states = chunk_states(maps, at_end @ new)
    return (q * grown) @ states + read @ (new - erased @ states)


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
    """Gated delta rule over `[B, T, H, D]`; `g` and `beta` are `[B, T, H]`."""
    expect_no_state(initial_state, output_final_state)
    with torch.autocast(query.device.type, enabled=False):
        heads = value.shape[2]
        if key.shape[2] != heads:
            query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
        q, k, v, log_decay, b = (split(x) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = unit(q), unit(k)
        q = q * q.shape[-1] ** -0.5
        total = log_decay.cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(upper(CHUNK, q.device), float("-inf")).exp()
        products = (q @ k.mT) * decay, (k @ k.mT) * decay
        out = delta_rule(q, k, v, b[..., None], total[..., None], products)
    return join(out, value.shape[1]).to(value.dtype), None


def chunk_kimi_delta_attention(
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
    """Delta rule over `[B, T, H, D]` with a decay of every channel: `g` is `[B, T, H, D]`, `beta` `[B, T, H]`."""
    expect_no_state(initial_state, output_final_state)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, log_decay, b = (split(x) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = unit(q), unit(k)
        q = q * q.shape[-1] ** -0.5
        total = log_decay.cumsum(-2)
        out = delta_rule(q, k, v, b[..., None], total, decayed_products(q, k, total))
    return join(out, value.shape[1]).to(value.dtype), None


def decayed_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """`Σ_d q_id k_jd exp(total_id - total_jd)` and the same of k with k: `[…, C, C]`, zero where j > i.

    Tokens of the second half see those of the first through the decay up to the border between them and the decay from
    there on. Neither is above one, however strong the decay: factors that start from a common origin would overflow.
    """
    size = q.shape[-2]
    if size <= NEAR:
        return NearProducts.apply(q, k, total)  # pyright: ignore[reportReturnType]
    half = size // 2
    border = total[..., half - 1 : half, :]
    since, until = (total[..., half:, :] - border).exp(), (border - total[..., :half, :]).exp()
    rows = torch.cat([q[..., half:, :] * since, k[..., half:, :] * since], -2)
    far = (rows @ (k[..., :half, :] * until).mT).split(half, -2)
    near = decayed_products(*(x.unflatten(-2, (2, half)) for x in (q, k, total)))
    read, overlap = (
        torch.cat([F.pad(n[..., 0, :, :], (0, half)), torch.cat([f, n[..., 1, :, :]], -1)], -2)
        for f, n in zip(far, near, strict=True)
    )
    return read, overlap


class NearProducts(torch.autograd.Function):
    """`decayed_products` of so few tokens that every pair's decay is computed.

    The gradient of a decay is what its query's and its key's gradients say already; the decays are not kept.
    """

    @staticmethod
    def decays(total: Tensor) -> Tensor:
        """Decay from token j to token i for every channel, `[…, C, C, D]`."""
        future = upper(total.shape[-2], total.device)[..., None]
        return (total[..., :, None, :] - total[..., None, :, :]).masked_fill(future, float("-inf")).exp()

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """See `decayed_products`."""
        ctx.save_for_backward(q, k, total)
        seen = k[..., None, :, :] * NearProducts.decays(total)
        return (q[..., :, None, :] * seen).sum(-1), (k[..., :, None, :] * seen).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and the totals, from those `[…, C, C]` of both products."""
        q, k, total = ctx.saved_tensors
        read, overlap = (x[..., None] for x in gradients)
        decay = NearProducts.decays(total)
        seen = k[..., None, :, :] * decay
        of_query, of_later = (read * seen).sum(-2), (overlap * seen).sum(-2)
        of_earlier = ((read * q[..., :, None, :] + overlap * k[..., :, None, :]) * decay).sum(-3)
        return of_query, of_later + of_earlier, q * of_query + k * (of_later - of_earlier)


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> Tensor:
    """Mamba-2 over x `[B, T, H, P]`, dt `[B, T, H]`, B and C `[B, T, G, K]`, in chunks of our own size."""
    expect_no_state(initial_states, return_final_states)
    with torch.autocast(hidden_states.device.type, enabled=False):
        (heads, width), (groups, length) = hidden_states.shape[2:], (B.shape[2], B.shape[1])
        wide = torch.promote_types(dt.dtype, torch.float32)
        step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        x = hidden_states.to(wide)
        v, k, q = split(x * step[..., None]), split(B), split(C)
        log_decay = split(A.to(wide) * step).unflatten(1, (groups, -1))  # [B, G, H/G, N, C]
        total = log_decay.cumsum(-1)

        def beside(heads_apart: Tensor) -> Tensor:
            """`[B, H, N, C, P]` -> `[B, G, N, C, H/G, P]`: heads of a group share its products."""
            return heads_apart.unflatten(1, (groups, -1)).movedim(2, 4)

        def columns(per_token: Tensor) -> Tensor:
            """`[B, G, H/G, N, C]` -> `[B, G, N, C, H/G, 1]`."""
            return per_token.movedim(2, 4)[..., None]

        sources = k.mT @ (beside(v) * columns((total[..., -1:] - total).exp())).flatten(-2)
        states = decayed_sums(total[..., -1], sources.unflatten(-1, (-1, width)))
        before = (q @ states.flatten(-2)).unflatten(-1, (-1, width)) * columns(total.exp())
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(upper(CHUNK, x.device), float("-inf")).exp()
        within = (decay * (q @ k.mT)[:, :, None]).flatten(1, 2) @ v
        out = join(within + before.movedim(4, 2).flatten(1, 2), length)
        if D is not None:
            out = out + D.to(wide)[:, None] * x
    return out.reshape(*hidden_states.shape[:2], heads, width).to(hidden_states.dtype)


def decayed_sums(log_decay: Tensor, sources: Tensor) -> Tensor:
    """States before each chunk from what chunks add, `[B, G, N, K, S, P]`, and their log-decays `[B, G, S, N]`."""
    chunks = log_decay.shape[-1]
    # Sums of one sign over each stretch of chunks: differences of long sums would lose digits
    stretch = log_decay[..., None].expand(*log_decay.shape, chunks)
    stretch = stretch.masked_fill(~upper(chunks, sources.device).mT, 0).cumsum(-2)
    decay = stretch.masked_fill(upper(chunks, sources.device), float("-inf")).exp()
    after = decay @ sources.movedim(4, 2).flatten(-2)
    return F.pad(after[..., :-1, :], (0, 0, 1, 0)).unflatten(-1, sources.shape[3:4] + sources.shape[5:]).movedim(2, 4)


def expect_no_state(before: Tensor | None, after: bool) -> None:
    """Raise where a caller brings a state or asks for one."""
    if before is not None or after:
        raise ValueError("the training forms of the recurrences take and return no state")


REPLACEMENTS: dict[str, Callable] = {
    "causal_conv1d_fn": causal_conv1d,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kimi_delta_attention,
    "mamba2_chunk_scan": mamba2_chunk_scan,
}
"""Name of a stock function -> what replaces it."""


def install(model: nn.Module) -> list[str]:
    """Replace the functions of the modelling file of `model` for good; return the names of those replaced."""
    module = sys.modules[type(model).__module__]
    names = [name for name in REPLACEMENTS if hasattr(module, name)]
    for name in names:
        setattr(module, name, REPLACEMENTS[name])
    return names


@contextmanager
def installed(model: nn.Module) -> Iterator[list[str]]:
    """The same for a while."""
    module = sys.modules[type(model).__module__]
    stock = {name: getattr(module, name) for name in REPLACEMENTS if hasattr(module, name)}
    try:
        yield install(model)
    finally:
        for name, function in stock.items():
            setattr(module, name, function)
