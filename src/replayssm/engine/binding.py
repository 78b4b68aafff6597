"""How a model's own code is led to the engine's caches, for as long as the engine lives.

Mixers get a subclass whose forward is the stock code object with two functions exchanged: the chunked scan and the
short convolution. Attention goes through transformers' registry of attention functions. A forward with another cache,
such as ``model.generate``, takes the stock path.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as once
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.accelerate import force_accelerate_hooks

from replayssm import ReplayError
from replayssm.integrations.transformers.mixer import expect_unwrapped, with_globals
from replayssm.integrations.transformers.registry import find_mixers
from replayssm.integrations.transformers.scan import Scan

from .packed import View, running

ATTENTION = "replayssm_packed"
CONVOLUTION = "causal_conv1d_fn"


def bind(model: nn.Module) -> list[nn.Module]:
    """Redirect the mixers of a model and return them.

    Raises:
        ReplayError: the model has a recurrence that cannot be replayed, is attached or bound already, or is training.
    """
    if any(hasattr(type(module), "stock") for module in model.modules()):
        raise ReplayError(f"{type(model).__name__}: is attached, or another engine has it; detach or close that first")
    if model.training:
        raise ReplayError(
            f"{type(model).__name__}: is in training mode, where dropout is random; call model.eval() first"
        )
    mixers = find_mixers(model, required=False)
    for mixer, _ in mixers:
        expect_unwrapped(mixer)
    for mixer, family in mixers:
        mixer.__class__ = _bound(type(mixer), family)
    return [mixer for mixer, _ in mixers]


def unbind(mixers: list[nn.Module]) -> None:
    """Make them stock again."""
    for mixer in mixers:
        mixer.__class__ = type(mixer).stock  # type: ignore[attr-defined]


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations that say which attention function a model calls."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextmanager
def packed(configs: list[Any], view: View) -> Iterator[None]:
    """While this is open, forwards of the model with these configurations use ``view`` in this thread."""
    before = [(config, config._attn_implementation) for config in configs]
    running.view = view
    try:
        for config, _ in before:
            config._attn_implementation = ATTENTION
        yield
    finally:
        running.view = None
        for config, name in before:
            config._attn_implementation = name


def cache_name(model: nn.Module) -> str:
    """What this version of transformers calls the cache argument of this model."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in parameters)


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    if running.view is None:
        raise ReplayError(f"attention {ATTENTION!r} works in an engine's forwards only")
    return running.view.attend(module, query, key, value, **options), None


AttentionInterface.register(ATTENTION, _attention)


@once
def _bound(stock: type[nn.Module], family: type[Scan]) -> type[nn.Module]:
    original = inspect.unwrap(stock.forward)
    names = list(inspect.signature(original).parameters)
    name = "cache" if "cache" in names else "cache_params"
    position = names.index(name) - 1
    functions = original.__globals__

    def scan(*args: Any, **kwargs: Any) -> Any:
        assert running.view is not None
        call = family(functions[family.function], *args, **kwargs)
        return call.result(running.view.scan(running.layer, call))

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any) -> Tensor:
        assert running.view is not None
        return running.view.convolve(running.layer, functions[CONVOLUTION], x, weight, bias, activation)

    replaced = with_globals(_unrepeated(original), **{family.function: scan, CONVOLUTION: convolve})
    inner = force_accelerate_hooks("conv1d")(replaced)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = args[position] if len(args) > position else kwargs.get(name)
        if not isinstance(cache, View):
            return stock.forward(self, *args, **kwargs)
        running.layer = self.layer_idx
        return inner(self, *args, **kwargs)

    return type(f"Engine{stock.__name__}", (stock,), {"forward": forward, "stock": stock, "__module__": __name__})


def _unrepeated(forward: Any) -> Any:
    """The same code, which hands keys over as they are: some versions of transformers repeat them for each value head.

    They do so where they count fewer key heads than value heads, so this code counts value heads in their place. A
    cache holds each key once.
    """
    code = forward.__code__
    if "repeat_interleave" not in code.co_names:
        return forward
    names = tuple("num_v_heads" if name == "num_k_heads" else name for name in code.co_names)
    parts = forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    changed = FunctionType(code.replace(co_names=names), *parts)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed
