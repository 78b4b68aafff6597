"""Means over half octaves of positions, summed up while the text goes by."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 16
"""Positions before this are in no bin."""


class Bins:
    """Half octaves that end at ``tokens``, on a logarithmic scale: bin i holds the positions from edge i to edge i+1.

    Attributes:
        tokens: N, positions of a text.
        edges: one more than there are bins, rising; the last is N.
    """

    def __init__(self, tokens: int) -> None:
        """Bins for texts of so many tokens."""
        self.tokens = tokens
        found = [tokens]
        while tokens * 2 ** (-len(found) / 2) >= SMALLEST:
            found.append(round(tokens * 2 ** (-len(found) / 2)))
        self.edges = sorted(found) if len(found) > 1 else [0, tokens]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def positions(self) -> list[int]:
        """The middle of each bin on a logarithmic scale."""
        return [round((max(a, 1) * b) ** 0.5) for a, b in zip(self.edges, self.edges[1:], strict=False)]

    @property
    def counts(self) -> list[int]:
        """Positions of each bin."""
        return [b - a for a, b in zip(self.edges, self.edges[1:], strict=False)]

    def of(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The bin of each position ``start…stop-1``, int64; their number for positions before the first one."""
        edges = torch.tensor(self.edges, device=device)
        place = torch.bucketize(torch.arange(start, stop, device=device), edges, right=True) - 1
        return torch.where(place < 0, len(self), place)


class Sums:
    """Sums of a number over the positions of each bin, and over all positions, for every policy.

    Attributes:
        bins: which positions count together.
        binned: float64 [P, bins + 1]; the last column is for positions in no bin.
    """

    def __init__(self, bins: Bins, policies: int, device: torch.device) -> None:
        """All zero."""
        self.bins = bins
        self.binned = torch.zeros((policies, len(bins) + 1), dtype=torch.float64, device=device)

    def add(self, values: Tensor, start: int) -> None:
        """Take values [P, R, T] of the positions from ``start`` on."""
        sums = values.double().sum(1)
        place = self.bins.of(start, start + sums.shape[1], sums.device)
        self.binned.index_add_(1, place, sums)

    def per_bin(self) -> Tensor:
        """[P, bins] on the CPU."""
        return self.binned[:, :-1].cpu()

    def total(self) -> Tensor:
        """[P] over all positions, on the CPU."""
        return self.binned.sum(1).cpu()
