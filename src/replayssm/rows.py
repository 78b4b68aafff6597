"""Which slots a batch touches, and which tokens are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import checks


class HostRows(NamedTuple):
    """A batch's numbers on the host, checked."""

    slots: list[int]
    offsets: list[int]
    parents: list[int] | None

    @property
    def counts(self) -> list[int]:
        """Tokens that each row brings."""
        return [after - before for before, after in zip(self.offsets, self.offsets[1:], strict=False)]


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows of a batch; row r owns tokens ``offsets[r]:offsets[r+1]`` and lives in ``slots[r]``.

    Attributes:
        slots: int32 [R]; −1 is padding, a no-op in every verb.
        offsets: int32 [R+1], from 0, never falling. Tokens at or past ``offsets[-1]`` are padding.
        parents: int32 [N] or None. For drafts that form a tree: each token's parent, row-local, −1 for a root; a parent
            comes before its children.
    """

    slots: Tensor
    offsets: Tensor
    parents: Tensor | None = None

    def __post_init__(self) -> None:
        device = self.slots.device if isinstance(self.slots, Tensor) else torch.device("cpu")
        for name in ("slots", "offsets", "parents"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checks.int_vector(name, value, device))

    @classmethod
    def decode(cls, slots: Tensor | Sequence[int]) -> Rows:
        """Plain decode: one token a row, padding rows included."""
        vector = checks.int_vector("slots", slots, _device(slots))
        return cls(vector, torch.arange(len(vector) + 1, dtype=torch.int32, device=vector.device))

    @classmethod
    def draft(
        cls,
        slots: Tensor | Sequence[int],
        counts: Tensor | Sequence[int],
        parents: Tensor | Sequence[int] | None = None,
    ) -> Rows:
        """Verify: ``counts[r]`` tokens in row r (0 is an ordinary number), a tree where ``parents`` is given."""
        vector = checks.int_vector("slots", slots, _device(slots))
        number = checks.int_vector("counts", counts, vector.device)
        if len(number) != len(vector):
            raise checks.ReplayError(f"counts: expected one entry a row ({len(vector)}), got {len(number)}")
        if number.device.type == "cpu" and bool((number < 0).any()):
            raise checks.ReplayError(f"counts: expected at least 0, got {int(number.min())}")
        offsets = torch.zeros(len(vector) + 1, dtype=torch.int32, device=vector.device)
        offsets[1:] = number.cumsum(0)
        tree = None if parents is None else checks.int_vector("parents", parents, vector.device)
        return cls(vector, offsets, tree)

    def host(self, slots: int, max_draft: int) -> HostRows:
        """The numbers on the host, checked against a cache of so many slots and this ``max_draft``."""
        found = HostRows(
            self.slots.tolist(), self.offsets.tolist(), None if self.parents is None else self.parents.tolist()
        )
        checks.slots("slots", found.slots, slots)
        checks.offsets(found.offsets, len(found.slots))
        checks.draft_counts(found.counts, max_draft)
        if found.parents is not None:
            if len(found.parents) < found.offsets[-1]:
                raise checks.ReplayError(
                    f"parents: expected one entry a token ({found.offsets[-1]}), got {len(found.parents)}"
                )
            checks.parents(found.parents, found.offsets)
        return found


def _device(values: Tensor | Sequence[int]) -> torch.device:
    return values.device if isinstance(values, Tensor) else torch.device("cpu")
