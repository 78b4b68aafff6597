"""Replay in Hugging Face transformers: ``attach(model)``, and ``model.generate`` goes on as before."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch
from torch import nn

from replayssm import MAMBA2, Layout, Precision, ReplayError

from .cache import Group, ReplayLayer
from .mixer import Place, expect_unwrapped, redirect, restore
from .registry import find_mixers
from .scan import Settings

__all__ = ["ReplayLayer", "attach", "detach"]

Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, window: int = 16, max_draft: int = 8, precision: Precision | None = None) -> Model:
    """Keep the recurrent states of this model as a checkpoint and a buffer of recent inputs.

    ``generate`` and ``forward`` are called as before and give the same results to floating-point rounding. Assisted
    generation and prompt lookup, which stock refuses for recurrent models, work too. Only this instance changes.

    Args:
        model: a model of transformers whose recurrent layers are Mamba-2, Gated DeltaNet or Kimi Delta Attention.
        window: tokens between two writes of a state.
        max_draft: most tokens that speculation brings in one step: the drafted ones (``prompt_lookup_num_tokens`` or
            ``num_assistant_tokens``) and the one before them. Plain decode does not pay for it.
        precision: how states are stored; ``Precision()`` (float32) by default.

    Returns:
        The model.

    Raises:
        ReplayError: the model has no recurrent layers, or other ones; it is attached already; a number is out of range.
    """
    settings = Settings(window, max_draft, Precision() if precision is None else precision)
    Layout(MAMBA2, 1, 1, 1, 1, window, max_draft, torch.float32, settings.precision)  # raises in the caller's words
    if any(hasattr(type(module), "stock") for module in model.modules()):
        raise ReplayError(f"{type(model).__name__}: is attached already; detach(model) first to change the settings")
    mixers = find_mixers(model)
    shapes: dict[object, list[int]] = {}
    for mixer, family in mixers:
        expect_unwrapped(mixer)
        shapes.setdefault(_shape(mixer, family), []).append(mixer.layer_idx)  # type: ignore[arg-type]
    for mixer, family in mixers:
        layers = tuple(shapes[_shape(mixer, family)])
        redirect(mixer, family, Place(Group(settings, layers), layers.index(mixer.layer_idx)))  # type: ignore[arg-type]
    for module in model.modules():
        if getattr(module, "_is_stateful", False) and not _hides_cache(module):
            module._is_stateful = False  # type: ignore[assignment]  # `generate` refuses to speculate where it is set
    return model


def detach(model: Model) -> Model:
    """Make the model stock again. Caches that it filled while attached cannot be continued.

    Raises:
        ReplayError: the model is not attached.
    """
    if not [mixer for mixer in model.modules() if restore(mixer)]:
        raise ReplayError(f"{type(model).__name__}: is not attached")
    for module in model.modules():
        vars(module).pop("_is_stateful", None)
    return model


def _shape(mixer: nn.Module, family: type) -> object:
    """What mixers must have in common to share a pool."""
    parameters = list(mixer.named_parameters())
    return family, parameters[0][1].device, tuple((name, tuple(p.shape)) for name, p in parameters)


def _hides_cache(module: nn.Module) -> bool:
    """Whether assisted generation looks in vain for this model's cache, by another name (mamba2 before 5.24)."""
    return not {"cache", "past_key_values"} & set(inspect.signature(module.forward).parameters)
