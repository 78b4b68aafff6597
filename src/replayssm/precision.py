"""From states to a layer's tensors and back, in the formats of a policy.

A format's tensors are called "checkpoint" or "read_copy" and what ``Format.specs`` adds: ``read_copy_scale``, ….
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm.formats import Format
from replayssm.layout import Layout, Precision
from replayssm.rounding import random_bits, round_stochastic

__all__ = ["decode", "encode", "is_copy", "parts", "random_bits", "round_stochastic", "store", "write"]


def write(state: Tensor, precision: Precision, seed: int, layer: int, counter: Tensor) -> dict[str, Tensor]:
    """Return what a layer keeps of ``state`` [R, H, P, K]: the tensors of the checkpoint and of its read copy, by name.

    Args:
        state: float32 (or float64).
        precision: names formats and rounding.
        seed, layer: of the cache.
        counter: [R] roundings that the slots have had since they were loaded.
    """
    bits = None
    if precision.rounding == "stochastic" and state.shape[0]:
        bits = random_bits(seed, layer, counter, state[0].numel(), state.shape[-1]).view(state.shape)
    kept = {"checkpoint" + suffix: part for suffix, part in precision.checkpoint_format.encode(state, bits).items()}
    return kept | encode(kept, precision, state.shape[-1])


def store(state: Tensor, precision: Precision, seed: int, layer: int, counter: Tensor) -> Tensor:
    """The checkpoint tensor alone of ``write``."""
    return write(state, precision, seed, layer, counter)["checkpoint"]


def encode(kept: Mapping[str, Tensor], precision: Precision, state_dim: int) -> dict[str, Tensor]:
    """Return the read copy of a checkpoint, both by tensor name; empty where the policy has none.

    A copy is made from what the checkpoint holds, not from the state that was rounded to it: copy and checkpoint agree
    (invariant I6) wherever they come from.
    """
    form, source = precision.read_format, precision.checkpoint_format
    if form is None:
        return {}
    wide = torch.float64 if precision.checkpoint == torch.float64 else torch.float32
    state = source.decode(parts("checkpoint", source, kept), state_dim, wide)
    return {"read_copy" + suffix: part for suffix, part in form.encode(state).items()}


def decode(name: str, tensors: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The states [.., H, P, K] that ``tensors`` hold as "checkpoint" or "read_copy", wide."""
    form = layout.precision.checkpoint_format if name == "checkpoint" else layout.precision.read_format
    assert form is not None
    return form.decode(parts(name, form, tensors), layout.state_dim, layout.wide)


def parts(name: str, form: Format, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a format by suffix, from a mapping by full name."""
    return {suffix: tensors[name + suffix] for suffix in form.specs(1, 1, 1)}


def is_copy(name: str) -> bool:
    """Whether a tensor belongs to the read copy, which follows from the checkpoint."""
    return name.startswith("read_copy")
