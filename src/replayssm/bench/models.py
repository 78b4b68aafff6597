"""Whole models with random weights in published sizes, built where they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from replayssm.checks import ReplayError
from replayssm.plan.resolve import shipped, shipped_config


@dataclass(frozen=True)
class Published:
    """A model of the benchmark.

    Attributes:
        config: name of a shipped config.
        changes: what differs from it.
        note: that, in words; rows say it.
    """

    config: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


MODELS = {
    "nemotron-3-nano-4b": Published("nemotron-3-nano-4b"),
    "qwen3.5-4b": Published("qwen3.5-4b"),
    "kimi-linear-kda": Published(
        "kimi-linear-48b-a3b",
        {
            "num_hidden_layers": 20,
            "first_k_dense_replace": 20,
            "linear_attn_config": {
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "kda_layers": list(range(1, 21)),
                "full_attn_layers": [],
            },
        },
        "the 20 KDA layers of Kimi-Linear-48B without its 7 MLA layers; every MLP is its dense one, as wide as the "
        "nine experts that a token takes",
    ),
    "falcon-h1-7b": Published(
        "falcon-h1-34b",
        {
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_n_groups": 1,
            "vocab_size": 130048,
        },
        "Falcon-H1-7B: depth, width and heads as published; MLP width, groups and vocabulary by its weights' number",
    ),
}
# Where a config lists its layers.
_LISTS = ("layers_block_type", "layer_types")


def raw_config(name: str) -> tuple[dict[str, Any], str]:
    """The config of a benchmark's model, a shipped model or a config.json, and a note about it."""
    if name in MODELS:
        chosen = MODELS[name]
        return {**shipped_config(chosen.config), **chosen.changes}, chosen.note
    if name in shipped():
        return shipped_config(name), ""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return json.loads(path.read_text(encoding="utf-8")), ""
    raise ReplayError(f"config: no {name!r}; known are {', '.join(MODELS)}, shipped ones and files of JSON")


def build(name: str, device: str, layers: int | None = None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model of transformers with random weights; ``layers``: only its first ones."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    raw, _ = raw_config(name)
    raw.pop("source", None)
    kind = raw.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ReplayError(f"config {name}: transformers {transformers.__version__} has no model type {kind!r}")
    if layers is not None:
        whole = raw.get("num_hidden_layers") or len(raw[next(key for key in _LISTS if key in raw)])
        if not 1 <= layers <= whole:
            raise ReplayError(f"layers: {name} has {whole}, got {layers}")
        raw["num_hidden_layers"] = layers
        raw.update({key: raw[key][:layers] for key in _LISTS if key in raw})
        if (parts := raw.get("linear_attn_config")) is not None:
            kept = {key: [n for n in parts[key] if n <= layers] for key in ("kda_layers", "full_attn_layers")}
            raw["linear_attn_config"] = {**parts, **kept}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**raw), dtype=dtype)
    return model.eval().requires_grad_(False)
