"""Bytes that one recurrent layer moves per sequence and step: the ordinary way and through checkpoint and buffer.

Formulas are in docs/planning.md. The buffer's entries come from `Layout.tensors`, so they cannot differ from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.layout import Layout

# A step multiplies keys with the values that were written ("delta") or with value and weight ("add"); a fold always
# starts from the raw inputs, so that nothing computed from a read enters the recurrence.
_PARTS = ("written_low", "written_scale")  # of formats that have them
_STEP_READS = {"add": ("key", "value", "weight", "decay"), "delta": ("key", "key_scale", "written", *_PARTS, "decay")}
_FOLD_READS = ("key", "key_scale", "value", "weight", "decay")


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written."""

    read: float = 0.0
    write: float = 0.0

    @property
    def total(self) -> float:
        """Bytes in both directions."""
        return self.read + self.write

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.write + other.write)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.read * factor, self.write * factor)


@dataclass(frozen=True)
class Cycle:
    """The average step between two folds.

    Attributes:
        tokens: committed per step.
        steps: per fold.
        length: committed entries that a step finds.
        folded: entries that a fold folds.
    """

    tokens: float
    steps: float
    length: float
    folded: float

    @classmethod
    def of(cls, window: int, max_draft: int = 1, acceptance: float = 1.0) -> Cycle:
        """A row that brings `max_draft` tokens a step, each draft accepted with this probability after the one before.

        The first of the tokens is certain. A commit folds the row when `length + max_draft > window` (invariant I4).
        """
        room = window - max_draft
        chances = [acceptance**n * (1 - acceptance) for n in range(max_draft - 1)] + [acceptance ** (max_draft - 1)]
        # visits[l]: how often a cycle that starts empty has a step at length l; above `room` it folds instead.
        visits = [1.0] + [0.0] * window
        for length in range(room + 1):
            for accepted, chance in enumerate(chances, start=1):
                visits[length + accepted] += visits[length] * chance
        steps = sum(visits[: room + 1])
        return cls(
            tokens=sum(n * chance for n, chance in enumerate(chances, start=1)),
            steps=steps,
            length=sum(length * visits[length] for length in range(room + 1)) / steps,
            folded=sum(length * visits[length] for length in range(room + 1, window + 1)),
        )


def entry_bytes(layout: Layout) -> dict[str, int]:
    """Bytes of each part of one buffer entry."""
    return {name: spec.nbytes // layout.window for name, spec in layout.tensors.items() if spec.entries}


def state_bytes(layout: Layout) -> int:
    """Bytes of the checkpoint of one slot, its scales included."""
    return sum(spec.nbytes for name, spec in layout.tensors.items() if name.startswith("checkpoint"))


def copy_bytes(layout: Layout) -> int:
    """Bytes of the read copy of one slot, its scales included; 0 without one."""
    return sum(spec.nbytes for name, spec in layout.tensors.items() if name.startswith("read_copy"))


def inputs_bytes(layout: Layout) -> Traffic:
    """Activations of one token: q, k, v and gates in, the output out. The same for every way of decoding."""
    width = layout.dtype.itemsize
    value = layout.heads * layout.head_dim
    decay = {"head": layout.heads, "channel": layout.heads * layout.state_dim, "none": 0}[layout.recurrence.decay]
    weight = layout.heads if layout.recurrence.update == "delta" else 0  # Mamba-2's dt is both decay and weight
    read = 2 * layout.groups * layout.state_dim + value + decay + weight
    return Traffic(read * width, value * width)


def conventional_step(layout: Layout) -> Traffic:
    """Read and rewrite the state; with drafts, write a copy after each of the `max_draft` tokens.

    The state is in the checkpoint's dtype. The snapshot of the accepted token becomes the state without a copy.
    """
    state = state_bytes(layout)
    return Traffic(state, state * layout.max_draft) + inputs_bytes(layout) * layout.max_draft


def replay_step(layout: Layout, acceptance: float = 1.0) -> Traffic:
    """Read the state and the buffer, append the tokens; a fold's share of the whole cycle is included."""
    cycle = Cycle.of(layout.window, layout.max_draft, acceptance)
    step = replay_read(layout, cycle.length) + inputs_bytes(layout) * layout.max_draft
    step += Traffic(write=sum(entry_bytes(layout).values()) * layout.max_draft)
    return step + fold(layout, cycle.folded) * (1 / cycle.steps)


def replay_read(layout: Layout, length: float) -> Traffic:
    """What a step reads when `length` entries are committed: read copy (or checkpoint) and their keys and values."""
    entry = entry_bytes(layout)
    used = sum(entry.get(name, 0) for name in _STEP_READS[layout.recurrence.update])
    return Traffic((copy_bytes(layout) or state_bytes(layout)) + used * length)


def fold(layout: Layout, entries: float) -> Traffic:
    """Read the checkpoint and `entries` raw inputs, write the checkpoint and its read copy."""
    entry, state = entry_bytes(layout), state_bytes(layout)
    raw = sum(entry.get(name, 0) for name in _FOLD_READS)
    return Traffic(state + raw * entries, state + copy_bytes(layout))
