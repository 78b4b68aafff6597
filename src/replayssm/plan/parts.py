"""The parts that architectures are made of: a mixer or a feed-forward part as a `Block`.

Weights are counted without norms, biases and other vectors (below 0.1 %).
"""

from __future__ import annotations

from replayssm.checks import ReplayError
from replayssm.layout import GDN, KDA, MAMBA2, Conv, Layout

from .shape import Block, Config

_LAYER_WORDS = {
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS = {*_PATTERN.values(), "indexed_attention", "sliding_attention", "hybrid"}


def layers(c: Config, *pattern: str) -> list[str]:
    """Layer types in today's words; `pattern` repeats when the config has no list."""
    given = c.get("layer_types", "layers_block_type", default=None)
    letters = c.get("hybrid_override_pattern", default=None)
    if given is None and letters is not None:
        given = [_PATTERN.get(letter, letter) for letter in str(letters)]
    if given is None:
        every = c.int("full_attention_interval", "layer_group_size", default=0)
        if every:
            pattern = (*(pattern[0],) * (every - 1), pattern[-1])
        given = [pattern[i % len(pattern)] for i in range(c.int("num_hidden_layers"))]
    kinds = [_LAYER_WORDS.get(kind, kind) for kind in given]
    if unknown := sorted(set(kinds) - _KINDS):
        raise ReplayError(f"config of type {c.model_type!r}: unknown layer type {unknown[0]!r}")
    return kinds


def mamba2(c: Config, heads: int, head_dim: int, groups: int, state: int) -> Block:
    """A Mamba-2 mixer: in_proj for z, x, B, C and dt, short convolution, out_proj."""
    hidden, inner = c.int("hidden_size"), heads * head_dim
    conv = Conv(inner + 2 * groups * state, c.int("conv_kernel", "mamba_d_conv", default=4))
    params = hidden * (2 * inner + 2 * groups * state + heads) + conv.channels * conv.width + inner * hidden
    return Block("recurrent", params, layout=Layout(MAMBA2, heads, groups, head_dim, state, conv=conv))


def gdn(c: Config, default_heads: int | None = None, extra: int = 0) -> Block:
    """A Gated DeltaNet mixer: q, k, v, output gate, a and b, short convolution, out_proj."""
    hidden = c.int("hidden_size")
    groups = c.int("linear_num_key_heads", default=default_heads)
    heads = c.int("linear_num_value_heads", default=default_heads)
    state = c.int("linear_key_head_dim", default=default_heads and int(0.75 * hidden / groups))
    head_dim = c.int("linear_value_head_dim", default=default_heads and 2 * state)
    conv = Conv(2 * groups * state + heads * head_dim, c.int("linear_conv_kernel_dim", default=4))
    inner = heads * head_dim
    params = hidden * (2 * groups * state + 3 * inner + 2 * heads) + conv.channels * conv.width + extra
    return Block("recurrent", params, layout=Layout(GDN, heads, groups, head_dim, state, conv=conv))


def kda(c: Config, heads: int, head_dim: int, kernel: int, *, full_rank: bool, extra: int = 0) -> Block:
    """A Kimi Delta Attention mixer; `full_rank` is that of the projections for decay and output gate."""
    hidden, inner = c.int("hidden_size"), heads * head_dim
    conv = Conv(3 * inner, kernel)
    # The decay and the output gate each have a projection of full rank, or one through a bottleneck of head_dim.
    gate = hidden * inner if full_rank else head_dim * (hidden + inner)
    params = 4 * hidden * inner + hidden * heads + 2 * gate + conv.channels * conv.width + extra
    return Block("recurrent", params, layout=Layout(KDA, heads, heads, head_dim, head_dim, conv=conv))


def attention(c: Config, *, gated: bool = False, extra: int = 0, reads: int | None = None, window: int = 0) -> Block:
    """Softmax attention over grouped heads; `gated`: the query projection also makes an output gate."""
    hidden, queries = c.int("hidden_size"), c.int("num_attention_heads")
    width = c.int("head_dim", "attention_head_dim", default=hidden // queries)
    kv = 2 * c.int("num_key_value_heads", default=queries) * width
    params = hidden * (queries * width * (2 if gated else 1) + kv) + queries * width * hidden + extra
    kind = "sliding" if window else "attention"
    return Block(kind, params, kv_elements=kv, keeps=window or None, reads=reads)


def mla(c: Config, *, extra: int = 0, reads: int | None = None) -> Block:
    """Multi-head latent attention: one latent per token is kept."""
    hidden, heads, latent = c.int("hidden_size"), c.int("num_attention_heads"), c.int("kv_lora_rank")
    rope, nope, value = c.int("qk_rope_head_dim"), c.int("qk_nope_head_dim"), c.int("v_head_dim")
    rank = c.get("q_lora_rank", default=None)
    queries = heads * (nope + rope)
    params = rank * (hidden + queries) if rank else hidden * queries
    params += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return Block("mla", params + extra, kv_elements=latent + rope, reads=reads)


def mlp(c: Config, *, matrices: int = 3, extra: int = 0) -> Block:
    """A feed-forward part of this many matrices: 3 with a gate, 2 without."""
    return Block("mlp", matrices * c.int("hidden_size") * c.int("intermediate_size") + extra)


def moe(c: Config, *, shared: int, width: int, matrices: int = 3, latent: int = 0, extra: int = 0) -> Block:
    """`shared`: width of the shared expert(s); `latent`: experts work in this width instead of the hidden one."""
    hidden, experts = c.int("hidden_size"), c.int("num_local_experts", "n_routed_experts", "num_experts")
    params = matrices * hidden * shared + hidden * experts + 2 * hidden * latent + extra
    per_token = c.int("num_experts_per_tok", "num_experts_per_token")
    return Block("moe", params, experts, per_token, expert_params=matrices * (latent or hidden) * width)
