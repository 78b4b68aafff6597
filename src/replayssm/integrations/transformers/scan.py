"""What the families have in common: one call of a stock chunked scan, cut by the token."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from replayssm import Layout, Precision, Recurrence, ReplayError
from replayssm.inputs import Inputs


@dataclass(frozen=True)
class Settings:
    """What the caller of ``attach`` chose (see there)."""

    window: int
    max_draft: int
    precision: Precision

    def layout(
        self, recurrence: Recurrence, sizes: tuple[int, int, int, int], dtype: torch.dtype, drafting: bool
    ) -> Layout:
        """A layout of ``sizes`` (heads, groups, head_dim, state_dim).

        Only a cache whose last tokens may be taken back leaves room for drafts: plain decode has the whole window.
        """
        draft = self.max_draft if drafting else 1
        return Layout(recurrence, *sizes, self.window, draft, dtype, self.precision)


class Scan(ABC):
    """One call of a family's chunked scan: T tokens of B sequences in one layer.

    Attributes:
        recurrence: of the family.
        function: name of the stock function, in every modeling file of the family.
        tokens: [B, T, …] tensors, one slice a token.
    """

    recurrence: ClassVar[Recurrence]
    function: ClassVar[str]
    tokens: tuple[Tensor, ...]

    @abstractmethod
    def __init__(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """``stock`` is the function that was to be called, with these arguments."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int, int, int]:
        """Heads, groups, head_dim, state_dim."""

    @abstractmethod
    def chunked(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, H, P] of the stock function from ``state`` [B, H, P, K], and the state after them."""

    def from_stock(self, state: Tensor) -> Tensor:
        """A state as the stock functions hold it -> [B, H, P, K]."""
        return state

    @abstractmethod
    def inputs(self) -> Inputs:
        """The tokens of all rows one after the other, as ``step`` takes them."""

    def finish(self, out: Tensor) -> Tensor:
        """What the stock function adds to the readout ``out`` [B, T, H, P]."""
        return out

    @abstractmethod
    def result(self, out: Tensor) -> Any:
        """Outputs [B, T, H, P] in the form in which the stock function returns them."""

    @property
    def batch(self) -> int:
        """B."""
        return self.tokens[0].shape[0]

    @property
    def count(self) -> int:
        """T."""
        return self.tokens[0].shape[1]

    def part(self, start: int, stop: int) -> Scan:
        """The same call with the tokens ``start…stop-1`` only."""
        return self._with(tuple(t[:, start:stop] for t in self.tokens))

    def rows(self, start: int, stop: int) -> Scan:
        """The same call with the rows ``start…stop-1`` only."""
        return self._with(tuple(t[start:stop] for t in self.tokens))

    def blocks(self, size: int) -> list[Scan]:
        """The same call cut after every ``size`` tokens, of which it has a multiple; a part's tokens are contiguous."""
        cut = [t.unflatten(1, (-1, size)).transpose(0, 1).contiguous() for t in self.tokens]
        return [self._with(tokens) for tokens in zip(*cut, strict=True)]

    def copied(self) -> Scan:
        """The same call with tokens in memory of their own, which ``fill`` overwrites."""
        return self._with(tuple(t.clone(memory_format=torch.contiguous_format) for t in self.tokens))

    def fill(self, other: Scan) -> None:
        """Overwrite the tokens with those of another call."""
        for mine, theirs in zip(self.tokens, other.tokens, strict=True):
            mine.copy_(theirs)

    def after(self, earlier: Scan) -> Scan:
        """The same call with the tokens of ``earlier`` in front."""
        pairs = zip(earlier.tokens, self.tokens, strict=True)
        return self._with(tuple(torch.cat(pair, dim=1) for pair in pairs))

    def kept(self) -> Scan:
        """The same call to be kept over forwards: without its graph, and without the memory of a long prompt."""
        kept = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(kept, name, value.detach())
        kept.tokens = tuple(t.detach().clone() for t in self.tokens)
        return kept

    def _with(self, tokens: tuple[Tensor, ...]) -> Scan:
        other = copy.copy(self)
        other.tokens = tokens
        return other


def refuse_packed(**options: Any) -> None:
    """Raise if sequences are packed into one row: the cache's rows are sequences."""
    for name, value in options.items():
        if value is not None:
            raise ReplayError(f"{name}: packed sequences share a row of the cache; pass use_cache=False, or one a row")
