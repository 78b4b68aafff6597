"""Which attribute of which config means what. One function per architecture, from a config to its blocks."""

from __future__ import annotations

from collections.abc import Callable

from replayssm.checks import ReplayError

from . import parts
from .shape import Block, Config, ModelShape

OTHER_RECURRENCES = {
    "mamba": "Mamba-1",
    "falcon_mamba": "Mamba-1",
    "jamba": "Mamba-1",
    "zamba": "Mamba-1",
    "recurrent_gemma": "RG-LRU",
    "rwkv": "RWKV",
    "xlstm": "xLSTM",
    "minimax": "lightning attention",
    "lfm2": "short convolutions only",
    "lfm2_moe": "short convolutions only",
}
_LINEAR = ("linear_attention",)


def parse(c: Config, name: str) -> ModelShape:
    """The shape of a model, or a `ReplayError` that says which recurrence it has and which are supported."""
    model_type = c.model_type.removesuffix("_text")
    if model_type not in FAMILIES:
        has = OTHER_RECURRENCES.get(model_type)
        what = f"its recurrence is {has}" if has else "it has no recurrence known here"
        raise ReplayError(
            f"model type {c.model_type!r}: {what}; supported are Mamba-2, GDN and KDA: {', '.join(sorted(FAMILIES))}"
        )
    try:
        blocks = tuple(FAMILIES[model_type](c))
    except KeyError as kind:
        raise ReplayError(f"config of type {c.model_type!r}: no layer type {kind} in this architecture") from None
    hidden, vocabulary = c.int("hidden_size"), c.int("vocab_size")
    # Hashed n-gram tables (Qwen4-Exp): memory only, a step reads a few rows.
    ngram = len(c.get("ple_layer_ids", default=())) and c.int("ngram_vocab_size_base") * (
        c.int("ple_embed_dim", default=hidden) * len(c.get("ple_layer_ids"))
    )
    return ModelShape(
        name=name or c.model_type,
        model_type=c.model_type,
        hidden=hidden,
        blocks=blocks,
        embedding_params=vocabulary * hidden + ngram,
        head_params=vocabulary * hidden,
        tied=bool(c.get("tie_word_embeddings", default=False)),
    )


def _pure_mamba2(c: Config) -> list[Block]:
    block = parts.mamba2(c, c.int("num_heads"), c.int("head_dim"), c.int("n_groups"), c.int("state_size"))
    return [block] * c.int("num_hidden_layers")


def _nemotron_h(c: Config) -> list[Block]:
    sizes = c.int("mamba_num_heads"), c.int("mamba_head_dim"), c.int("n_groups", "mamba_n_groups")
    make: dict[str, Callable[[], Block]] = {
        "linear_attention": lambda: parts.mamba2(c, *sizes, c.int("ssm_state_size")),
        "full_attention": lambda: parts.attention(c),
        "mlp": lambda: parts.mlp(c, matrices=2),
        "moe": lambda: parts.moe(
            c,
            shared=c.int("moe_shared_expert_intermediate_size"),
            width=c.int("moe_intermediate_size"),
            matrices=2,
            latent=c.int("moe_latent_size", default=0),
        ),
    }
    return [make[kind]() for kind in parts.layers(c)]


def _ibm_mamba2(c: Config) -> Block:
    inner = c.get("mamba_d_ssm", default=None) or c.int("mamba_expand", default=2) * c.int("hidden_size")
    heads = c.int("mamba_n_heads")
    return parts.mamba2(c, heads, inner // heads, c.int("mamba_n_groups", default=1), c.int("mamba_d_state"))


def _bamba(c: Config) -> list[Block]:
    attention = set(c.get("attn_layer_indices", default=()))
    mixers = [parts.attention(c) if i in attention else _ibm_mamba2(c) for i in range(c.int("num_hidden_layers"))]
    return [block for mixer in mixers for block in (mixer, parts.mlp(c))]


def _falcon_h1(c: Config) -> list[Block]:
    return [_ibm_mamba2(c), parts.attention(c), parts.mlp(c)] * c.int("num_hidden_layers")


def _granite(c: Config) -> list[Block]:
    shared = c.int("shared_intermediate_size")
    if c.int("num_local_experts", default=0):
        feed = parts.moe(c, shared=shared, width=c.int("intermediate_size"))
    else:
        feed = Block("mlp", 3 * c.int("hidden_size") * shared)
    mixers = [parts.attention(c) if kind == "full_attention" else _ibm_mamba2(c) for kind in parts.layers(c)]
    return [block for mixer in mixers for block in (mixer, feed)]


def _zamba2(c: Config) -> list[Block]:
    hidden, kinds = c.int("hidden_size"), parts.layers(c)
    heads, queries = c.int("n_mamba_heads"), c.int("num_attention_heads")
    inner = c.int("mamba_expand", default=2) * hidden
    mamba = parts.mamba2(c, heads, inner // heads, c.int("mamba_ngroups", default=1), c.int("mamba_d_state"))
    # A hybrid layer runs one of `num_mem_blocks` shared transformer blocks over [hidden, embedding], then its Mamba-2.
    stored = c.int("num_mem_blocks", default=1) / max(1, kinds.count("hybrid"))
    wide = 2 * hidden
    kv = 2 * c.int("num_key_value_heads", default=queries) * (wide // queries)
    attention = Block("attention", wide * (wide + kv) + wide * hidden, stored=stored, kv_elements=kv)
    feed_width = c.get("intermediate_size", default=None) or 4 * hidden
    feed = Block("mlp", 3 * hidden * feed_width, stored=stored)
    rank = c.int("adapter_rank", default=128)
    own = Block("mlp", hidden * hidden + rank * (hidden + 2 * feed_width))
    return [b for kind in kinds for b in ((attention, feed, own, mamba) if kind == "hybrid" else (mamba,))]


def _qwen(c: Config) -> list[Block]:
    hidden, kinds = c.int("hidden_size"), parts.layers(c, *_LINEAR * 3, "full_attention")
    streams = c.int("hc_count", default=0) * hidden  # Qwen4-Exp's hyper-connections: one mixer per block
    mix = streams * (2 * c.int("hc_lowrank", default=0) + c.int("hc_count", default=0))
    index = hidden * c.int("indexer_head_dim", default=0) * (1 + c.int("indexer_n_heads", default=0))
    # Qwen4-Exp's checkpoint calls its indexed layers "full_attention"; without an indexer both words mean the same.
    attention = parts.attention(c, gated=True, extra=mix + index, reads=c.get("indexer_budget", default=None))
    linear = parts.gdn(c, extra=mix)
    mixers = {"linear_attention": linear, "full_attention": attention, "indexed_attention": attention}
    dense, step = set(c.get("mlp_only_layers", default=())), c.int("decoder_sparse_step", default=1)
    blocks = []
    for i, kind in enumerate(kinds):
        if c.int("num_experts", default=0) and i not in dense and (i + 1) % step == 0:
            shared = c.int("shared_expert_intermediate_size")
            feed = parts.moe(c, shared=shared, width=c.int("moe_intermediate_size"), extra=mix)
        else:
            feed = parts.mlp(c, extra=mix)
        blocks += [mixers[kind], feed]
    return blocks


def _olmo_hybrid(c: Config) -> list[Block]:
    linear = parts.gdn(c, default_heads=c.int("num_attention_heads"))
    mixers = [
        linear if kind == "linear_attention" else parts.attention(c)
        for kind in parts.layers(c, *_LINEAR * 3, "full_attention")
    ]
    return [block for mixer in mixers for block in (mixer, parts.mlp(c))]


def _lara_mini(c: Config) -> list[Block]:
    pattern = *_LINEAR, "sliding_attention", *_LINEAR, "full_attention", "sliding_attention"
    mixers = {
        "linear_attention": parts.gdn(c),
        "full_attention": parts.attention(c),
        "sliding_attention": parts.attention(c, window=c.int("sliding_window", default=512)),
    }
    feed = parts.moe(c, shared=c.int("shared_expert_intermediate_size"), width=c.int("moe_intermediate_size"))
    return [block for kind in parts.layers(c, *pattern) for block in (mixers[kind], feed)]


def _kda_model(c: Config, kinds: list[str], linear: Block, full: Block, dense: int, extra: int = 0) -> list[Block]:
    """KDA beside MLA; the first `dense` layers have an MLP, the others experts."""
    shared = c.int("n_shared_experts", "num_shared_experts", default=1) * c.int("moe_intermediate_size")
    moe = parts.moe(c, shared=shared, width=c.int("moe_intermediate_size"), extra=extra)
    given = c.get("mlp_layer_types", default=None)
    feeds = given or [
        "dense" if i < c.int("first_k_dense_replace", default=dense) else "sparse" for i in range(len(kinds))
    ]
    mixers = [linear if kind == "linear_attention" else full for kind in kinds]
    pairs = zip(mixers, feeds, strict=True)
    return [block for mixer, feed in pairs for block in (mixer, moe if feed == "sparse" else parts.mlp(c, extra=extra))]


def _linear_attn(c: Config) -> Config:
    """Checkpoints keep KDA's sizes in a dict of their own."""
    nested = c.get("linear_attn_config", default=None) or {}
    return Config({"model_type": c.model_type, **nested})


def _kimi_linear(c: Config) -> list[Block]:
    nested, count = _linear_attn(c), c.int("num_hidden_layers")
    heads = nested.int("num_heads", default=c.get("linear_num_heads", default=32))
    head_dim = nested.int("head_dim", default=c.get("linear_head_dim", default=128))
    kernel = nested.int("short_conv_kernel_size", default=c.get("linear_conv_kernel_dim", default=4))
    full = set(nested.get("full_attn_layers", default=range(5, count + 1, 4)))  # counted from one
    kinds = parts.layers(c, *("full_attention" if i + 1 in full else "linear_attention" for i in range(count)))
    return _kda_model(c, kinds, parts.kda(c, heads, head_dim, kernel, full_rank=False), parts.mla(c), dense=1)


def _bailing_hybrid(c: Config) -> list[Block]:
    heads, hidden = c.int("num_attention_heads"), c.int("hidden_size")
    # A transformers object has overwritten `head_dim` by the rotary width and keeps KDA's as `linear_head_dim`.
    head_dim, kernel = c.int("linear_head_dim", "head_dim"), c.int("short_conv_kernel_size", default=4)
    linear = parts.kda(c, heads, head_dim, kernel, full_rank=True)
    return _kda_model(
        c, parts.layers(c, *_LINEAR * 5, "full_attention"), linear, parts.mla(c, extra=hidden * heads), dense=2
    )


def _glm5_next(c: Config) -> list[Block]:
    nested, hidden = _linear_attn(c), c.int("hidden_size")
    heads = nested.int("num_heads", default=c.get("linear_num_heads", default=64))
    head_dim = nested.int("head_dim", default=c.get("linear_head_dim", default=128))
    kernel = nested.int("short_conv_kernel_size", default=c.get("linear_conv_kernel_dim", default=4))
    streams = c.int("hc_mult", default=4)  # hyper-connections: pre, post and a mixing matrix per block
    mix = streams * (streams + 2) * streams * hidden
    index = c.int("index_head_dim", default=128)
    indexer = index * (c.int("q_lora_rank") * c.int("index_n_heads", default=32) + 2 * hidden)
    linear = parts.kda(c, heads, head_dim, kernel, full_rank=False, extra=mix)
    full = parts.mla(c, extra=mix + indexer, reads=c.int("index_topk", default=2048))
    return _kda_model(c, parts.layers(c, *_LINEAR * 3, "indexed_attention"), linear, full, dense=3, extra=mix)


FAMILIES: dict[str, Callable[[Config], list[Block]]] = {
    "mamba2": _pure_mamba2,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "zamba2": _zamba2,
    "qwen3_next": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen4_exp": _qwen,
    "olmo_hybrid": _olmo_hybrid,
    "lara_mini": _lara_mini,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "glm5_next": _glm5_next,
}
