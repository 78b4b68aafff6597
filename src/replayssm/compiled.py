"""The verbs as torch custom operators, for ``torch.compile(fullgraph=True)``.

``step``, ``conv_step`` and ``commit`` call these while they are traced. An operator is opaque: it finds its cache by a
number and runs the same code as an eager call. ``order`` is a tensor of the cache that every operator claims to change,
so that a compiler neither drops, doubles nor reorders them; nothing is written to it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm.checks import ReplayError
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, LinearInputs, Mamba2Inputs
from replayssm.rows import Rows


class Cache(Protocol):
    """What operators need of a cache."""

    order: Tensor
    number: int


FAMILIES = {family.__name__: family for family in (Mamba2Inputs, GdnInputs, KdaInputs, LinearInputs)}
# Fields that are no tensors, by family, with what they are when nobody sets them.
PLAIN: dict[str, tuple[str, Any]] = {
    "Mamba2Inputs": ("dt_limit", None),
    "GdnInputs": ("allow_neg_eigval", False),
    "KdaInputs": ("lower_bound", None),
    "LinearInputs": ("unit", False),
}
_numbers = itertools.count(1)
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# The eager functions by name, put here by the modules that define them (which import this one).
eager: dict[str, Callable[..., Any]] = {}


def register(cache: Cache) -> int:
    """Give a cache the number by which operators find it."""
    number = next(_numbers)
    _caches[number] = cache
    return number


def step(cache: Cache, layer: int, inputs: Inputs, rows: Rows) -> Tensor:
    """``replayssm.step`` under a tracer."""
    family = type(inputs).__name__
    if family not in FAMILIES:
        raise ReplayError(f"inputs: torch.compile takes {', '.join(FAMILIES)}, got {family}")
    plain, _ = PLAIN[family]
    tensors = [getattr(inputs, item.name) for item in fields(inputs) if item.name != plain]  # type: ignore[arg-type]
    numbers = _to_numbers(getattr(inputs, plain))
    arguments = (family, tensors, numbers, rows.slots, rows.offsets, rows.parents)
    return torch.ops.replayssm.step(cache.order, cache.number, layer, *arguments)


def conv_step(
    cache: Cache, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, activation: str | None
) -> Tensor:
    """``replayssm.conv_step`` under a tracer."""
    arguments = (x, weight, bias, rows.slots, rows.offsets, rows.parents, activation or "")
    return torch.ops.replayssm.conv_step(cache.order, cache.number, layer, *arguments)


def commit(cache: Cache, rows: Rows, accepted: Tensor, path: Tensor | None) -> None:
    """``ReplayCache.commit`` under a tracer; ``accepted`` and ``path`` are tensors there."""
    torch.ops.replayssm.commit(cache.order, cache.number, rows.slots, rows.offsets, rows.parents, accepted, path)


def _to_numbers(value: Any) -> list[float]:
    if value is None:
        return []
    return [float(v) for v in value] if isinstance(value, tuple) else [float(value)]


def _from_numbers(family: str, numbers: Sequence[float]) -> dict[str, Any]:
    name, default = PLAIN[family]
    if not numbers:
        return {name: default}
    if name == "dt_limit":
        return {name: tuple(numbers)}
    return {name: bool(numbers[0]) if isinstance(default, bool) else numbers[0]}


def _cache(number: int) -> Any:
    cache = _caches.get(number)
    if cache is None:
        raise ReplayError("step: the cache of this compiled function is gone")
    return cache


@torch.library.custom_op("replayssm::step", mutates_args=("order",))
def _step(
    order: Tensor,
    number: int,
    layer: int,
    family: str,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[float],
    slots: Tensor,
    offsets: Tensor,
    parents: Tensor | None,
) -> Tensor:
    plain = PLAIN[family][0]
    names = [item.name for item in fields(FAMILIES[family]) if item.name != plain]
    inputs = FAMILIES[family](**dict(zip(names, tensors, strict=True)), **_from_numbers(family, numbers))
    return eager["step"](_cache(number)[layer], inputs, Rows(slots, offsets, parents))


@_step.register_fake
def _(order, number, layer, family, tensors, numbers, slots, offsets, parents) -> Tensor:  # type: ignore
    value = tensors[0] if family == "Mamba2Inputs" else tensors[2]
    return value.new_empty(value.shape)


@torch.library.custom_op("replayssm::conv_step", mutates_args=("order",))
def _conv_step(
    order: Tensor,
    number: int,
    layer: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    parents: Tensor | None,
    activation: str,
) -> Tensor:
    return eager["conv_step"](_cache(number)[layer], x, weight, bias, Rows(slots, offsets, parents), activation or None)


@_conv_step.register_fake
def _(order, number, layer, x, weight, bias, slots, offsets, parents, activation) -> Tensor:  # type: ignore
    return x.new_empty(x.shape)


@torch.library.custom_op("replayssm::commit", mutates_args=("order",))
def _commit(
    order: Tensor,
    number: int,
    slots: Tensor,
    offsets: Tensor,
    parents: Tensor | None,
    accepted: Tensor,
    path: Tensor | None,
) -> None:
    _cache(number).commit(Rows(slots, offsets, parents), accepted, path)


@_commit.register_fake
def _(order, number, slots, offsets, parents, accepted, path) -> None:  # type: ignore
    return None
