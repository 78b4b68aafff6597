"""How a model's mixers are redirected without copying a line of them.

The stock ``forward`` runs as it is, with two things exchanged: its cache is a `PrefillView`, so that it always takes
its prefill path, and the one function that this path calls for the recurrence is ours, because the code object runs
with globals of its own. Nothing that other instances use is touched: the module gets a subclass, that the function.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from functools import cache as once
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks

from replayssm import ReplayError

from .cache import Group, ReplayLayer, adopt
from .scan import Scan


@dataclass(frozen=True)
class Place:
    """Where an attached mixer's state is: number ``index`` of the layers of ``group``."""

    group: Group
    index: int


class PrefillView:
    """What an attached mixer sees as its cache: convolution states, and never an earlier recurrent state."""

    def __init__(self, layer: ReplayLayer) -> None:
        """A view of one layer."""
        self.layer = layer

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """False: there is a prefill to do."""
        return False

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """None: `update_conv_state` puts the earlier inputs in front."""

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """None: the state is in the pool."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """The new inputs of the convolution with the earlier ones in front, which the layer remembers."""
        self.layer.expect_batch(conv_states.shape[0])
        return self.layer.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Nothing: the scan has told the pool."""
        return recurrent_states


class _Running(threading.local):
    """The layer whose mixer runs in this thread, for the function that the mixer calls."""

    layer: ReplayLayer
    place: Place


_running = _Running()


def expect_unwrapped(mixer: nn.Module) -> None:
    """Raise if something else replaced this instance's forward: a subclass would not be reached."""
    if "forward" in vars(mixer):
        raise ReplayError(
            f"{type(mixer).__name__}: its forward is wrapped already (accelerate's hooks, a kernel or a profiler); "
            "attach before wrapping"
        )


def redirect(mixer: nn.Module, family: type[Scan], place: Place) -> None:
    """Replay this mixer's recurrence whenever it is given a cache."""
    mixer.__class__ = _redirected(type(mixer), family)
    mixer.replay_place = place  # type: ignore[assignment]


def restore(mixer: nn.Module) -> bool:
    """Undo `redirect`; False if there is nothing to undo."""
    stock = getattr(type(mixer), "stock", None)
    if stock is None:
        return False
    mixer.__class__ = stock
    del mixer.replay_place
    return True


@once
def _redirected(stock: type[nn.Module], family: type[Scan]) -> type[nn.Module]:
    original = inspect.unwrap(stock.forward)
    name = "cache" if "cache" in inspect.signature(original).parameters else "cache_params"
    position = list(inspect.signature(original).parameters).index(name) - 1
    inner = force_accelerate_hooks("conv1d")(_rebound(original, family))

    @torch.compiler.disable
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = args[position] if len(args) > position else kwargs.get(name)
        layer = None if cache is None else adopt(cache, self.layer_idx)
        if layer is None:
            return stock.forward(self, *args, **kwargs)
        if len(args) > position:
            args = (*args[:position], PrefillView(layer), *args[position + 1 :])
        else:
            kwargs[name] = PrefillView(layer)
        _running.layer, _running.place = layer, self.replay_place
        return inner(self, *args, **kwargs)

    return type(f"Replay{stock.__name__}", (stock,), {"forward": forward, "stock": stock, "__module__": __name__})


def _rebound(original: Any, family: type[Scan]) -> FunctionType:
    """The same code with its scan replaced."""
    scan = original.__globals__[family.function]

    def replayed(*args: Any, **kwargs: Any) -> Any:
        call = family(scan, *args, **kwargs)
        place = _running.place
        return call.result(_running.layer.advance(call, place.group, place.index))

    return with_globals(original, **{family.function: replayed})


def with_globals(original: Any, **functions: Any) -> FunctionType:
    """The same code, which finds ``functions`` in place of the globals of their names."""
    namespace = {**original.__globals__, **functions}
    rebound = FunctionType(original.__code__, namespace, original.__name__, original.__defaults__, original.__closure__)
    rebound.__kwdefaults__ = original.__kwdefaults__
    return rebound
