"""The verbs on the host: for caches on the CPU, and for torch on any device that has no kernels of its own.

Every value is checked before anything is written. The arithmetic is the backend's (``backends.pick``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm import checks
from replayssm.backends.convolution import convolve
from replayssm.backends.torch import Batch
from replayssm.checks import ReplayError
from replayssm.inputs import Inputs, LinearInputs
from replayssm.rounding import row_keys
from replayssm.rows import HostRows, Rows

if TYPE_CHECKING:
    from replayssm.cache import ReplayCache

# What a layer's uncommitted tokens are of: the first index of ``ReplayCache._drafts``.
RECURRENCE, CONVOLUTION = 0, 1
# Rows that are folded together where the new states pass through float32 on their way to the checkpoint.
_FOLD_ROWS = 8


class Host:
    """The verbs of one cache."""

    def __init__(self, cache: ReplayCache) -> None:
        self.cache = cache

    def step(self, layer: int, inputs: Inputs, rows: Rows) -> Tensor:
        """See ``replayssm.step``; the inputs are checked already."""
        cache, layout = self.cache, self.cache.layout
        host = self._rows(rows)
        if inputs.tokens < host.offsets[-1]:
            raise ReplayError(f"inputs: rows own {host.offsets[-1]} tokens, got N={inputs.tokens}")
        self.expect_room(layer, host, RECURRENCE)
        batch = self._batch(host)
        if batch is not None and isinstance(inputs, LinearInputs) and inputs.g is not None:
            most = float(inputs.g[batch.tokens].max())
            if most > 0:
                raise ReplayError(f"g: a log-decay must be ≤ 0, got {most:.4g}")
        if batch is None:
            shape = (inputs.tokens, layout.heads, layout.head_dim)
            out = torch.zeros(shape, dtype=layout.dtype, device=cache.device)
        else:
            out = cache.backend.step(cache._tensors[layer], layout, inputs, batch)
        self._note_drafts(layer, host, RECURRENCE)
        return out

    def conv_step(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, activation: str | None
    ) -> Tensor:
        """See ``replayssm.conv_step``; shapes, dtypes and devices are checked already."""
        host = self._rows(rows)
        if x.shape[0] < host.offsets[-1]:
            raise ReplayError(f"x: rows own {host.offsets[-1]} tokens, got N={x.shape[0]}")
        self.expect_room(layer, host, CONVOLUTION)
        out = torch.zeros_like(x)
        batch = self._batch(host)
        if batch is not None:
            convolve(out, self.cache._tensors[layer]["conv"], self.cache._position, x, weight, bias, batch, activation)
        self._note_drafts(layer, host, CONVOLUTION)
        return out

    def commit(
        self, rows: Rows, accepted: Tensor | Sequence[int], path: Tensor | Sequence[Sequence[int]] | None
    ) -> None:
        """See ``ReplayCache.commit``."""
        cache = self.cache
        host = self._rows(rows)
        taken = checks.int_vector("accepted", accepted, torch.device("cpu")).tolist()
        checks.accepted(taken, host.counts)
        lines = _path_lines(path, taken)
        checks.path(lines, taken, host.offsets, host.parents, given=path is not None)
        self._expect_stepped(host, taken)
        live = [r for r, slot in enumerate(host.slots) if slot >= 0]
        index = torch.tensor([host.slots[r] for r in live], dtype=torch.int64, device=cache.device)
        moved = [r for r in live if lines[r][: taken[r]] != list(range(taken[r]))]
        for r in moved:
            self._compact(host.slots[r], lines[r][: taken[r]])
        count = torch.tensor([taken[r] for r in live], dtype=torch.int32, device=cache.device)
        cache.length[index] += count
        if cache.layout.conv is not None:
            ring = cache.layout.tensors["conv"].shape[1]
            cache._position[index] = (cache._position[index] + count) % ring
        cache._drafts[:, :, index] = 0
        self._fold(index[cache.length[index] > cache._limit[index]])

    def fold(self, slots: Tensor | Sequence[int]) -> None:
        """See ``ReplayCache.fold``."""
        _, index = self.cache._live(self.cache._slots("slots", slots))
        self.cache._drafts[:, :, index] = 0
        self._fold(index[self.cache.length[index] > 0])

    def materialise(self, layer: int, slots: Tensor) -> Tensor:
        """States after the committed tokens: [R, H, P, K] wide, for slots [R] int64 that are in the cache."""
        cache = self.cache
        return cache.backend.advance(cache._tensors[layer], cache.layout, slots, cache.length[slots].long())

    def check(self) -> None:
        """Nothing waits to be raised: the host checks at once."""

    def expect_room(self, layer: int, host: HostRows, kind: int) -> None:
        """Raise if a step with these rows would overwrite drafts of another step that nobody committed."""
        verb = "step" if kind == RECURRENCE else "conv_step"
        pending = self.cache._drafts[kind, layer].tolist()
        for row, (slot, count) in enumerate(zip(host.slots, host.counts, strict=True)):
            if slot >= 0 and pending[slot] not in (0, count):
                raise ReplayError(
                    f"{verb}: row {row} (slot {slot}) brings {count} tokens to layer {layer}, which holds "
                    f"{pending[slot]} uncommitted ones of an earlier step; commit them first (accepted=0 drops them)"
                )

    def _note_drafts(self, layer: int, host: HostRows, kind: int) -> None:
        """Remember how many uncommitted tokens the rows have in a layer."""
        pairs = [(slot, count) for slot, count in zip(host.slots, host.counts, strict=True) if slot >= 0]
        if pairs:
            slots, counts = zip(*pairs, strict=True)
            self.cache._drafts[kind, layer, list(slots)] = torch.tensor(
                counts, dtype=torch.int32, device=self.cache.device
            )

    def _rows(self, rows: Rows) -> HostRows:
        if not isinstance(rows, Rows):
            raise ReplayError(f"rows: expected Rows, got {type(rows).__name__}")
        return rows.host(self.cache.slots, self.cache.layout.max_draft)

    def _batch(self, host: HostRows) -> Batch | None:
        """The rows that bring tokens, as the backends want them; None where there are none."""
        every = host.counts
        live = [r for r, (slot, count) in enumerate(zip(host.slots, every, strict=True)) if slot >= 0 and count]
        if not live:
            return None
        counts = [every[r] for r in live]
        most = max(counts)
        places = [[host.offsets[r] + min(t, n - 1) for t in range(most)] for r, n in zip(live, counts, strict=True)]
        device = self.cache.device
        valid = parents = None
        if min(counts) != most:
            valid = torch.tensor([[t < n for t in range(most)] for n in counts], device=device)
        if host.parents is not None and most > 1:
            lines = [[host.parents[place] for place in line] for line in places]
            parents = torch.tensor(lines, device=device)
            if valid is not None:
                parents = torch.where(valid, parents, -1)
        slots = torch.tensor([host.slots[r] for r in live], device=device)
        length = self.cache.length[slots].long()
        return Batch(slots, length, torch.tensor(places, device=device), valid, parents, int(length.max()))

    def _fold(self, index: Tensor) -> None:
        """Fold the slots ``index`` [R] (int64) in every layer."""
        if not len(index):
            return
        cache = self.cache
        length, counter = cache.length[index].long(), cache.folds[index] + 1
        in_place = cache.backend.folds_in_place(cache.layout)
        for layer, tensors in enumerate(cache._tensors):
            if in_place:
                keys = None
                if cache.layout.precision.rounding == "stochastic":
                    keys = row_keys(cache.seed, layer, counter)
                cache.backend.fold_in_place(tensors, cache.layout, index, length, keys)
                continue
            for start in range(0, len(index), _FOLD_ROWS):
                rows = slice(start, start + _FOLD_ROWS)
                state = cache.backend.advance(tensors, cache.layout, index[rows], length[rows])
                cache._store(layer, index[rows], state, counter[rows])
        cache.length[index] = 0
        cache.folds[index] = counter
        cache._limit[index] = cache.layout.room

    def _compact(self, slot: int, line: list[int]) -> None:
        """Move the drafts along a tree's path to where a chain would have them."""
        cache = self.cache
        base = int(cache.length[slot])
        source = torch.tensor(line, device=cache.device)
        for tensors in cache._tensors:
            for name, spec in cache.layout.tensors.items():
                if spec.entries:
                    entries = tensors[name][slot]
                    entries[:, base : base + len(line)] = entries[:, base + source]
        if cache.layout.conv is not None:
            places = cache.ring_places(torch.tensor([slot], device=cache.device), 0, cache.layout.max_draft)[0]
            for tensors in cache._tensors:
                ring = tensors["conv"][slot]
                ring[:, places[: len(line)]] = ring[:, places[source]]

    def _expect_stepped(self, host: HostRows, taken: list[int]) -> None:
        cache = self.cache
        kinds = [(RECURRENCE, "step")]
        if cache.layout.conv is not None:
            kinds.append((CONVOLUTION, "conv_step"))
        for kind, verb in kinds:
            for layer, pending in enumerate(cache._drafts[kind].tolist()):
                for row, (slot, count) in enumerate(zip(host.slots, host.counts, strict=True)):
                    if slot >= 0 and taken[row] and pending[slot] != count:
                        raise ReplayError(
                            f"commit: row {row} (slot {slot}) accepts {taken[row]} of {count} tokens, but layer "
                            f"{layer} holds {pending[slot]} uncommitted ones; {verb} every layer with these rows first"
                        )


def _path_lines(path: Tensor | Sequence[Sequence[int]] | None, taken: list[int]) -> list[list[int]]:
    """The accepted tokens of each row; without a path, its first ones."""
    if path is None:
        return [list(range(count)) for count in taken]
    if isinstance(path, Tensor):
        if path.ndim != 2 or path.dtype not in (torch.int32, torch.int64):
            raise ReplayError(f"path: expected integers [R, T], got {checks.dtype_name(path.dtype)} {list(path.shape)}")
        return path.tolist()
    nested = isinstance(path, Sequence) and all(isinstance(line, Sequence) for line in path)
    if not nested or not all(isinstance(token, int) for line in path for token in line):
        raise ReplayError("path: expected integers [R, T] or a sequence of integers a row")
    return [list(line) for line in path]
