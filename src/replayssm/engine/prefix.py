"""Beginnings of prompts that are computed once: states and keys at the boundaries between chunks.

A tree of blocks. A block holds the keys and values of its own tokens and the recurrent states after its last one, so a
prompt that begins with the same blocks continues from there, exactly as if it had been computed again: chunks end at
the same places with and without reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .runner import Runner, Snapshot


@dataclass(eq=False)
class _Block:
    parent: _Block | None
    tokens: tuple[int, ...]
    snapshot: Snapshot | None
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Blocks of ``block`` tokens in at most ``limit`` bytes; those that were not used for longest go first.

    Attributes:
        bytes: of what is held.
        blocks: how many.
    """

    def __init__(self, block: int, limit: int) -> None:
        """``limit`` in bytes; 0 holds nothing."""
        self.block, self.limit = block, limit
        self.bytes = self.blocks = 0
        self._root = _Block(None, (), None)
        self._clock = 0

    def find(self, tokens: Sequence[int]) -> list[Snapshot]:
        """The blocks that ``tokens`` begins with, in order."""
        return [block.snapshot for block in self._walk(tokens) if block.snapshot is not None]

    def add(self, tokens: Sequence[int], runner: Runner, slot: int) -> None:
        """Keep the slot's sequence, which is ``tokens``, a whole number of blocks."""
        if not self.limit:
            return
        start = len(tokens) - self.block
        line = self._walk(tokens[:start])
        if len(line) * self.block != start:
            return  # a block before it is gone
        parent = line[-1] if line else self._root
        key = tuple(tokens[start:])
        if key in parent.children:
            return
        snapshot = runner.export(slot, start)
        if snapshot.bytes > self.limit:
            return
        self._clock += 1
        parent.children[key] = _Block(parent, key, snapshot, used=self._clock)
        self.bytes += snapshot.bytes
        self.blocks += 1
        while self.bytes > self.limit:
            self._evict()

    def clear(self) -> None:
        """Forget all."""
        self._root.children.clear()
        self.bytes = self.blocks = 0

    def _walk(self, tokens: Sequence[int]) -> list[_Block]:
        found, at = [], self._root
        self._clock += 1
        for start in range(0, len(tokens) - self.block + 1, self.block):
            child = at.children.get(tuple(tokens[start : start + self.block]))
            if child is None:
                break
            child.used = self._clock
            found.append(child)
            at = child
        return found

    def _evict(self) -> None:
        """Drop the block that was used longest ago and that no other one continues."""
        leaves, stack = [], list(self._root.children.values())
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            if not block.children:
                leaves.append(block)
        oldest = min(leaves, key=lambda block: block.used)
        assert oldest.parent is not None
        assert oldest.snapshot is not None
        del oldest.parent.children[oldest.tokens]
        self.bytes -= oldest.snapshot.bytes
        self.blocks -= 1
