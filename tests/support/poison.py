"""NaN where nobody may look, and pictures of a cache that are compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm import ReplayCache

BOOKS = ("length", "folds", "_limit", "_position", "_drafts")


def poison(cache: ReplayCache, value: float = float("nan")) -> None:
    """Fill every entry at or past ``length``, drafts included, and the convolution's places past its tail."""
    layout = cache.layout
    for slot, length in enumerate(cache.length.tolist()):
        for tensors in cache.views():
            for name, spec in layout.tensors.items():
                if spec.entries:
                    tensors[name][slot][:, length:] = value
            if layout.conv is not None:
                places = cache.ring_places(torch.tensor([slot], device=cache.device), 0, layout.max_draft)[0]
                tensors["conv"][slot][:, places] = value


def picture(cache: ReplayCache) -> dict[str, Tensor]:
    """A copy of everything that the cache holds."""
    found = {name: getattr(cache, name).clone() for name in BOOKS}
    for layer, tensors in enumerate(cache.views()):
        found |= {f"{layer}.{name}": tensor.clone() for name, tensor in tensors.items()}
    return found


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and -0 differs from 0."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit."""
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Names of what differs between two pictures."""
    assert before.keys() == after.keys()
    return [name for name in before if not same(before[name], after[name])]


def live_parts(cache: ReplayCache, slots: Sequence[int]) -> dict[str, Tensor]:
    """What the slots' sequences consist of: checkpoints, committed entries, convolution tails."""
    found: dict[str, Tensor] = {}
    for layer, tensors in enumerate(cache.views()):
        for slot in slots:
            for name, spec in cache.layout.tensors.items():
                part = tensors[name][slot]
                if spec.entries:
                    part = part[:, : int(cache.length[slot])]
                elif name == "conv":
                    part = cache.conv_tail(layer, [slot])
                found[f"{layer}.{slot}.{name}"] = part.clone()
    return found
