"""Tiny models of every type that transformers has, and what the tests of the adapter do with them."""

import copy
import inspect
import json
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from replayssm.integrations.transformers import attach

transformers.logging.set_verbosity_error()

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "tiny_configs.json").read_text())
NAMES = [name for name in CONFIGS["supported"] if name in CONFIG_MAPPING]
ONE_EACH = ["mamba2", "qwen3_next", "kimi_linear"]
VOCABULARY = 128


@cache
def _built(name: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[name](**{**CONFIGS["supported"], **extra()}[name]["config"])
    auto = AutoModelForImageTextToText if name == "glm5_next" else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def extra() -> dict:
    """Models that help: a plain attention model to draft with."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return {"llama": {"config": {**sizes, **tokens}}}


def stock(name: str, seed: int = 0) -> torch.nn.Module:
    """A model as transformers makes it; the same weights for the same seed."""
    return copy.deepcopy(_built(name, seed))


def attached(name: str, seed: int = 0, **settings) -> torch.nn.Module:
    """The same model with replayed layers."""
    return attach(stock(name, seed), **{"window": 8, "max_draft": 5, **settings})


def noisy(model: torch.nn.Module, scale: float) -> torch.nn.Module:
    """Another model that often agrees with this one."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += scale * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    return other


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens [batch, length], none of them special."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: torch.nn.Module, ids: torch.Tensor, new: int = 20, **options) -> torch.Tensor:
    """New tokens only."""
    out = model.generate(ids, max_new_tokens=new, **{"do_sample": False, **options})
    return out[:, ids.shape[1] :]


def cache_name(model: torch.nn.Module) -> str:
    """What this version calls the cache argument of this model."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in parameters)


def new_cache(model: torch.nn.Module, recording: bool = False) -> DynamicCache:
    """An empty cache, as ``generate`` makes it."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if recording:
        cache.activate_past_recording()
    return cache


@torch.no_grad()
def feed(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits [batch, length, vocabulary] of these tokens, which the cache then holds."""
    # Given no positions, bamba counts them from zero in each forward.
    place = (
        {}
        if "position_ids" not in inspect.signature(model.forward).parameters
        else {"position_ids": positions(cache, ids)}
    )
    return model(input_ids=ids, use_cache=True, **{cache_name(model): cache}, **place).logits


def positions(cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Where these tokens stand in the text."""
    return (torch.arange(ids.shape[1]) + cache.get_seq_length()).expand(len(ids), -1)


@torch.no_grad()
def whole(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a stock model that reads the whole text at once, without a cache."""
    return model(input_ids=ids, use_cache=False).logits


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to float32 rounding through a few layers."""
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)
