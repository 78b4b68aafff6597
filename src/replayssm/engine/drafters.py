"""Who guesses the next tokens: text that came before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from replayssm import ReplayError, checks

from .sampling import Point
from .tree import Draft

# Of an n-gram that came often, only so many occurrences are looked at, the newest ones.
OCCURRENCES = 16


@dataclass(frozen=True)
class Ask:
    """One sequence that wants a draft.

    Attributes:
        key: of the sequence, the same at every step.
        tokens: all that are known.
        depth: most tokens one after the other.
        limit: most tokens in all; more than ``depth`` only helps branches.
        point: how the token after ``tokens`` is chosen.
    """

    key: Hashable
    tokens: Sequence[int]
    depth: int
    limit: int
    point: Point


class Drafter(Protocol):
    """Anything that guesses. A wrong guess costs time, never a wrong text.

    Attributes:
        cost: of guessing and verifying one token, as a part of what a token costs without drafts, above 0 and below 1.
            Only as many tokens are asked for as are accepted more often than that.
    """

    cost: float

    def bind(self, model: nn.Module, slots: int, max_length: int, max_draft: int) -> None:
        """An engine with this model takes the drafter."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft for each sequence; an empty one is an ordinary step."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over or goes away for a while; unknown keys are no error."""
        ...

    def close(self) -> None:
        """The engine is closed."""
        ...


@dataclass(frozen=True)
class Seen:
    """What a forward of the model computed for good of one sequence.

    Attributes:
        key: of the sequence.
        start: how many tokens were computed before.
        hidden: [n, hidden_size], what the model's output layer read after each token.
        tokens: all that are known; the last one's successor is not among them.
        heirs: keys of sequences that go on from a copy of this one.
    """

    key: Hashable
    start: int
    hidden: Tensor
    tokens: Sequence[int]
    heirs: Sequence[Hashable] = ()


@runtime_checkable
class Observer(Drafter, Protocol):
    """A drafter that wants to know what the model thought."""

    def observe(self, seen: Sequence[Seen]) -> None:
        """After each forward, before its new tokens are known; sequences that were observed are in the engine."""
        ...


class _Lookup:
    """What the drafters that look into the sequence itself have in common.

    Attributes:
        cost: of verifying alone: guessing takes no time.
    """

    cost = 0.2

    def bind(self, model: nn.Module, slots: int, max_length: int, max_draft: int) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class _Places:
    """Where the n-grams of a sequence end, newest last."""

    seen: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class PromptLookup(_Lookup):
    """What followed the last tokens when they came before (n-grams)."""

    def __init__(self, ngram: int = 3, least: int = 1, branches: int = 1) -> None:
        """Look for the last ``ngram`` tokens, then for fewer, down to ``least``; follow ``branches`` occurrences."""
        self.ngram = checks.integer("ngram", ngram, 1)
        self.least = checks.integer("least", least, 1, ngram)
        self.branches = checks.integer("branches", branches, 1)
        self._places: dict[Hashable, _Places] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See ``Drafter.propose``."""
        return [self._one(ask) for ask in asks]

    def forget(self, key: Hashable) -> None:
        """See ``Drafter.forget``."""
        self._places.pop(key, None)

    def _one(self, ask: Ask) -> Draft:
        tokens = ask.tokens
        places = self._places.setdefault(ask.key, _Places())
        # Up to the last token but one: its end is where nothing follows yet.
        for end in range(places.seen + 1, len(tokens)):
            for size in range(self.least, min(self.ngram, end) + 1):
                places.ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        places.seen = max(places.seen, len(tokens) - 1)
        chains: list[Sequence[int]] = []
        for size in range(min(self.ngram, len(tokens)), self.least - 1, -1):
            for end in reversed(places.ends.get(tuple(tokens[len(tokens) - size :]), [])[-OCCURRENCES:]):
                chain = tokens[end : end + ask.depth]
                if chain not in chains:
                    chains.append(chain)
                if len(chains) == self.branches:
                    return Draft.merged(chains, ask.limit)
        return Draft.merged(chains, ask.limit)


class _Automaton:
    """The suffix automaton of a growing sequence: all its substrings, in linear memory.

    State 0 is empty. ``reach[s]`` is where the first occurrence of its substrings ends, ``link[s]`` the state of the
    longest suffix that also occurs elsewhere.
    """

    def __init__(self) -> None:
        self.size, self.link, self.reach = [0], [-1], [0]
        self.next: list[dict[int, int]] = [{}]
        self.last = self.seen = 0

    def append(self, token: int) -> None:
        """The sequence grows by a token (Blumer et al.)."""
        self.seen += 1
        new = self._state(self.seen, self.seen, {})
        at = self.last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        if at < 0:
            self.link[new] = 0
        elif self.size[old := self.next[at][token]] == self.size[at] + 1:
            self.link[new] = old
        else:
            twin = self._state(self.size[at] + 1, self.reach[old], dict(self.next[old]))
            self.link[twin], self.link[old], self.link[new] = self.link[old], twin, twin
            while at >= 0 and self.next[at].get(token) == old:
                self.next[at][token] = twin
                at = self.link[at]
        self.last = new

    def match(self) -> tuple[int, int]:
        """The longest suffix that came before: its length, and where it ended then."""
        state = self.link[self.last]
        return (0, 0) if state < 0 else (self.size[state], self.reach[state])

    def _state(self, size: int, reach: int, following: dict[int, int]) -> int:
        self.size.append(size)
        self.link.append(0)
        self.reach.append(reach)
        self.next.append(following)
        return len(self.size) - 1


class SuffixLookup(_Lookup):
    """What followed the longest end of the text that came before; longer matches draft more."""

    def __init__(self, least: int = 2, factor: float = 2.0) -> None:
        """Ignore matches of fewer than ``least`` tokens; draft at most ``factor`` tokens for each matched one."""
        self.least = checks.integer("least", least, 1)
        if factor <= 0:
            raise ReplayError(f"factor: expected more than 0, got {factor}")
        self.factor = factor
        self._texts: dict[Hashable, _Automaton] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See ``Drafter.propose``."""
        return [self._one(ask) for ask in asks]

    def forget(self, key: Hashable) -> None:
        """See ``Drafter.forget``."""
        self._texts.pop(key, None)

    def _one(self, ask: Ask) -> Draft:
        text = self._texts.setdefault(ask.key, _Automaton())
        for token in ask.tokens[text.seen :]:
            text.append(token)
        size, end = text.match()
        if size < self.least:
            return Draft()
        most = min(ask.depth, ask.limit, max(1, int(size * self.factor)))
        return Draft.chain(ask.tokens[end : end + most])
