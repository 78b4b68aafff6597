"""How many tokens to draft, from how many were accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Old measurements count less: by this much with each step.
MEMORY = 0.9
# Steps without a draft, after which one token is drafted to see whether the text has changed.
PATIENCE = 8


@dataclass
class Acceptance:
    """Measured on one sequence.

    Attributes:
        hits: drafted tokens that were accepted, and
        trials: drafted tokens that were reached, both with fading memory. They start as if two of two were accepted.
        idle: steps since the last draft.
    """

    hits: float = 2.0
    trials: float = 2.0
    idle: int = 0

    @property
    def rate(self) -> float:
        """Probability that a drafted token is accepted if the ones before it are; never quite 0 or 1."""
        return (self.hits + 0.05) / (self.trials + 0.1)

    def depth(self, most: int, cost: float) -> int:
        """Tokens to draft, one after the other: those that are accepted more often than ``cost``, 0…``most``."""
        depth = min(most, int(math.log(cost) / math.log(self.rate)))
        return min(most, 1) if depth == 0 and self.idle >= PATIENCE else depth

    def note(self, accepted: int, depth: int) -> None:
        """A step drafted ``depth`` tokens one after the other and the first ``accepted`` were right."""
        self.idle = 0 if depth else self.idle + 1
        if depth:
            self.hits = self.hits * MEMORY + accepted
            self.trials = self.trials * MEMORY + min(accepted + 1, depth)
