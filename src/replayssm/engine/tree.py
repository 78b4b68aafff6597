"""Drafts that branch, and which branch the target takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from replayssm import ReplayError


@dataclass
class Draft:
    """Tokens that may come next: a chain, or a tree whose branches exclude each other.

    Attributes:
        tokens: parents before children.
        parents: of each token, −1 where it follows the text; a chain counts 0, 1, 2, … after −1.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Draft:
        """One token after the other."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)))

    @classmethod
    def merged(cls, chains: Sequence[Sequence[int]], limit: int) -> Draft:
        """At most ``limit`` tokens: chains with a common beginning share it, and earlier chains go first."""
        draft = cls()
        for chain in chains:
            at = -1
            for token in chain:
                found = draft.child(at, token)
                if found is None:
                    if draft.size == limit:
                        return draft
                    found = draft.add(at, token)
                at = found
        return draft

    def add(self, parent: int, token: int) -> int:
        """Append a token under another one and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def child(self, parent: int, token: int) -> int | None:
        """The number of this token under ``parent``."""
        pairs = enumerate(zip(self.parents, self.tokens, strict=True))
        return next((i for i, pair in pairs if pair == (parent, token)), None)

    def path(self, node: int) -> list[int]:
        """Tokens from the text to ``node``, itself included."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def check(self, limit: int, vocabulary: int) -> None:
        """Raise unless these are at most ``limit`` tokens of the model, parents before children."""
        if len(self.parents) != len(self.tokens):
            raise ReplayError(f"draft: {len(self.tokens)} tokens, but {len(self.parents)} parents")
        if self.size > limit:
            raise ReplayError(f"draft: the drafter was asked for at most {limit} tokens and proposed {self.size}")
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocabulary:
                raise ReplayError(f"draft: expected token ids 0…{vocabulary - 1}, got {token}")
            if not -1 <= parent < node:
                raise ReplayError(f"draft: token {node} has parent {parent}; parents come before children")

    @property
    def size(self) -> int:
        """Tokens in all."""
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens of the longest branch."""
        return max((len(self.path(node)) for node in range(len(self.tokens))), default=0)

    @property
    def row_parents(self) -> list[int] | None:
        """Parents in a row that begins with the token before the draft; None for a chain."""
        if self.parents == list(range(-1, len(self.tokens) - 1)):
            return None
        return [-1, *(parent + 1 for parent in self.parents)]

    def follow(self, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
        """Go down the tree as the target chooses.

        Args:
            chosen: what it chose after the text, and after each token of the draft.

        Returns:
            The row's tokens that stay (0 is the token before the draft, i + 1 the draft's token i), and what the target
            chose after each: the new text.
        """
        at, path, text = -1, [0], [chosen[0]]
        while (found := self.child(at, text[-1])) is not None:
            at = found
            path.append(at + 1)
            text.append(chosen[at + 1])
        return path, text
