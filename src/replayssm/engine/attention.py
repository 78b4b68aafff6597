"""Attention over slots: keys and values of every sequence, with its own length, rolled back like the states.

A slot's keys lie in order, so that committing is counting and rejecting is not counting. Each row attends by itself
over a view of its slot: nothing is padded or copied, and a row's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import ReplayError


@dataclass(frozen=True)
class Span:
    """A row's place: tokens ``start…stop-1`` of the forward, after ``length`` committed ones of ``slot``.

    Attributes:
        slot: where the sequence lives.
        start: first token.
        stop: after the last one.
        length: committed tokens of the sequence.
        parents: of a tree, row-local, −1 for the root; None: a chain.
    """

    slot: int
    start: int
    stop: int
    length: int
    parents: Sequence[int] | None = None

    @property
    def count(self) -> int:
        """T, new tokens."""
        return self.stop - self.start

    @property
    def seen(self) -> int:
        """Tokens that are in the slot during this forward."""
        return self.length + self.count

    def depths(self) -> list[int]:
        """How many of the row's tokens are above each one."""
        if self.parents is None:
            return list(range(self.count))
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found


class KeyValues:
    """Keys and values of the attention layers.

    Attributes:
        layers: ``layer_idx`` -> keys [slots, heads, max_length, dim] and values [slots, heads, max_length, dim].
        latent: layers that cache something smaller, from which they expand the keys and values of all tokens.
        device: where they are.
    """

    def __init__(
        self,
        shapes: dict[int, tuple[int, int, int]],
        latent: frozenset[int],
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``shapes``: heads, width of a key and width of a value, for each layer."""
        self.latent, self.device = latent, device
        self.layers = {
            layer: tuple(torch.empty((slots, heads, max_length, dim), dtype=dtype, device=device) for dim in dims)
            for layer, (heads, *dims) in shapes.items()
        }

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for pair in self.layers.values() for t in pair)

    def write(self, layer: int, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        """Put [1, heads, N, dim] after the committed ones of each slot."""
        for whole, new in zip(self.layers[layer], (keys, values), strict=True):
            for span in spans:
                whole[span.slot, :, span.length : span.seen] = new[0, :, span.start : span.stop]

    def of(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """A row's keys and values [1, heads, seen, dim]: a view."""
        keys, values = (whole[span.slot, :, : span.seen][None] for whole in self.layers[layer])
        return keys, values

    def gather(self, layer: int, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """All rows' keys and values one after the other: [1, heads, Σ seen, dim]."""
        keys, values = (torch.cat(parts, 2) for parts in zip(*(self.of(layer, s) for s in spans), strict=True))
        return keys, values

    def keep(self, span: Span, path: Sequence[int]) -> None:
        """Move the tokens along a tree's path to where a chain would have them."""
        if list(path) == list(range(len(path))):
            return
        for pair in self.layers.values():
            for whole in pair:
                new = whole[span.slot, :, span.length : span.seen]
                new[:, : len(path)] = new[:, list(path)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another one."""
        for pair in self.layers.values():
            for whole in pair:
                whole[target, :, :length] = whole[source, :, :length]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Span,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> Tensor:
    """One row's attention.

    Args:
        query: [1, heads, T, dim].
        keys: [1, key heads, seen, dim]; heads share key heads in order.
        values: as keys, maybe of another width.
        span: the row.
        scaling: of the scores; None: dim^-½.
        sliding_window: how many tokens a query sees, itself included; None: all.
        options: what else the model asks for; only switched off.

    Returns:
        [1, heads, T, value dim].

    Raises:
        ReplayError: an option that changes the scores and is not supported.
    """
    refuse(options)
    heads, count = query.shape[1], span.count
    groups = keys.shape[1]
    if sliding_window is not None:
        first = max(0, span.seen - count - sliding_window + 1)
        keys, values = keys[:, :, first:], values[:, :, first:]
    mask = _mask(span, keys.shape[2], sliding_window, query.device)
    # Heads that share a key are further queries of it: no key is repeated in memory.
    query = query.reshape(1, groups, heads // groups * count, query.shape[3])
    if mask is not None and heads != groups:
        mask = mask.repeat(heads // groups, 1)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(1, heads, count, values.shape[3])


def _mask(span: Span, seen: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of the last ``seen`` tokens each new token may see: [T, seen]; None: all."""
    if span.count == 1:
        return None
    new = torch.ones((span.count, span.count), dtype=torch.bool, device=device).tril()
    depth = torch.tensor(span.depths(), device=device)
    if span.parents is not None:
        lines = lines_of(span.parents)
        new = torch.tensor([[line >> j & 1 == 1 for j in range(span.count)] for line in lines], device=device)
    mask = torch.cat([new.new_ones((span.count, seen - span.count)), new], 1)
    if window is not None:
        places = torch.cat([torch.arange(span.count - seen, 0, device=device), depth])
        mask &= places > depth[:, None] - window
    return mask


def refuse(options: Mapping[str, object]) -> None:
    """Raise for an option that changes the scores and is not supported."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ReplayError(f"engine: attention with {name} is not supported")


def lines_of(parents: Iterable[int]) -> list[int]:
    """For each token of a row, a number whose bit j is set if token j is this one or above it."""
    lines: list[int] = []
    for token, parent in enumerate(parents):
        lines.append((lines[parent] if parent >= 0 else 0) | 1 << token)
    return lines
