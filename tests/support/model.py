"""A cache beside a dict of slot -> true sequence. Every verb goes to both; every output is compared with the oracle.

The model knows states, convolution tails and drafts, in float64 on the CPU, and nothing of windows or folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from replayssm import Conv, Layout, ReplayCache, Rows, conv_step, step
from replayssm.inputs import Inputs
from replayssm.reference import causal_conv, token_loop
from support.makers import chain, put, random_inputs, random_state, spoil, take
from support.poison import poison, same

# Largest accepted difference, relative to max(1, |right value|), by the dtype of the outputs.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Truth:
    """What a slot truly holds, by layer: state [H, P, K] and tail [C, width-1]."""

    state: list[Tensor]
    tail: list[Tensor] = field(default_factory=list)

    def copy(self) -> Truth:
        return Truth(list(self.state), list(self.tail))


@dataclass
class Draft:
    """A step that is not committed: its rows, its inputs, and by layer and row the state after each token."""

    rows: Rows
    slots: list[int]
    counts: list[int]
    parents: list[int] | None
    inputs: list[Inputs]
    x: list[Tensor]
    states: list[list[Tensor]]
    outputs: list[tuple[Tensor, Tensor | None]]
    dropped: set[int] = field(default_factory=set)

    def line(self, row: int, token: int) -> list[int]:
        """Row-local path from the root to a token."""
        found: list[int] = []
        first = int(self.rows.offsets[row])
        while token >= 0:
            found.append(token)
            token = token - 1 if self.parents is None else self.parents[first + token]
        return found[::-1]


class Model:
    """Drive ``cache`` and the truth together.

    Args:
        name: corner or flavour (``support.makers``).
        layout: of the cache.
        layers, slots, device: as for ``ReplayCache.allocate``.
        seed: of all random numbers.
    """

    def __init__(
        self, name: str, layout: Layout, layers: int = 1, slots: int = 4, device: str = "cpu", seed: int = 0
    ) -> None:
        self.name, self.layout, self.layers, self.slots, self.device = name, layout, layers, slots, device
        self.cache = ReplayCache.allocate(layout, layers, slots, device)
        self.source = torch.Generator().manual_seed(seed)
        self.truth = [self.blank() for _ in range(slots)]
        self.draft: Draft | None = None
        self.taps = []
        if (conv := layout.conv) is not None:
            self.taps = [self.random(conv.channels, conv.width) for _ in range(layers)]
            self.bias = [self.random(conv.channels) for _ in range(layers)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64).to(self.layout.dtype)

    def blank(self) -> Truth:
        layout = self.layout
        state = torch.zeros(layout.heads, layout.head_dim, layout.state_dim, dtype=torch.float64)
        conv = layout.conv
        tail = [] if conv is None else [torch.zeros(conv.channels, conv.width - 1).double()] * self.layers
        return Truth([state] * self.layers, tail)

    # Verbs -----------------------------------------------------------------------------------------------------------

    def load(self, slots: Sequence[int], phase: Sequence[int] | int | None = None) -> None:
        """Random states and tails, as after a prefill."""
        conv = self.layout.conv
        fresh = {slot: self.blank() for slot in slots if slot >= 0}
        for layer in range(self.layers):
            state = random_state(self.layout, len(slots), self.source)
            self.cache.load(layer, slots, state.to(self.device), phase=phase)
            tail = None
            if conv is not None:
                tail = self.random(len(slots), conv.channels, conv.width - 1)
                self.cache.load_conv(layer, slots, tail.to(self.device))
            for row, slot in enumerate(slots):
                if slot >= 0:
                    fresh[slot].state[layer] = state[row].double()
                    if tail is not None:
                        fresh[slot].tail[layer] = tail[row].double()
        for slot, sequence in fresh.items():
            self.truth[slot] = sequence
        self.drop(slots)

    def step(
        self, slots: Sequence[int], counts: Sequence[int], parents: list[int] | None = None, extra: int = 1
    ) -> list[Tensor]:
        """Bring random tokens, NaN in those that nobody owns; compare the outputs; return them by layer."""
        rows = Rows.draft(
            torch.tensor(list(slots), dtype=torch.int32, device=self.device),
            torch.tensor(list(counts), dtype=torch.int32, device=self.device),
            parents,
        )
        total = sum(counts)
        dead = [n for r, slot in enumerate(slots) if slot < 0 for n in chain(rows, r)]
        dead += range(total, total + extra)
        inputs, x = [], []
        for _ in range(self.layers):
            inputs.append(spoil(random_inputs(self.name, self.layout, total + extra, self.source), dead))
            if self.layout.conv is not None:
                x.append(self.random(total + extra, self.layout.conv.channels))
                x[-1][dead] = float("nan")
        self.draft = Draft(rows, list(slots), list(counts), parents, inputs, x, [], [])
        poison(self.cache)
        for layer in range(self.layers):
            self.draft.outputs.append(self._run(layer))
            self.draft.states.append(self._expect_outputs(layer))
        return [out for out, _ in self.draft.outputs]

    def again(self) -> None:
        """Repeat the step: the same bits."""
        assert self.draft is not None
        if self.draft.dropped:
            return
        poison(self.cache)
        for layer, (out, conv) in enumerate(self.draft.outputs):
            out_2, conv_2 = self._run(layer)
            assert same(out, out_2)
            assert conv is None or conv_2 is None or same(conv, conv_2)

    def commit(self, accepted: Sequence[int], ends: Sequence[int] | None = None) -> None:
        """Accept a row's first tokens, or with ``ends`` the path to a token of each row (−1: nothing)."""
        draft = self.draft
        assert draft is not None
        lines = [list(range(n)) for n in accepted]
        path = None
        if ends is not None:
            lines = [draft.line(r, end) for r, end in enumerate(ends)]
            most = max([len(line) for line in lines], default=0)
            padded = [line + [-1] * (most - len(line)) for line in lines]
            path = torch.tensor(padded, dtype=torch.int64).view(len(lines), most)
        self.cache.commit(draft.rows, [len(line) for line in lines], path=path)
        for r, slot in enumerate(draft.slots):
            if slot >= 0 and lines[r]:
                assert slot not in draft.dropped
                sequence = self.truth[slot]
                for layer in range(self.layers):
                    sequence.state[layer] = draft.states[layer][r][lines[r][-1]]
                    if draft.x:
                        seen = draft.x[layer][chain(draft.rows, r)][lines[r]].T.double()
                        tail = sequence.tail[layer]
                        sequence.tail[layer] = torch.cat([tail, seen], 1)[:, -tail.shape[1] :]
        self.draft = None

    def fold(self, slots: Sequence[int]) -> None:
        self.cache.fold(slots)
        self.drop(slots)
        assert all(self.cache.length[slot] == 0 for slot in slots if slot >= 0)

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.cache.fork(src, dst)
        moved = [self.truth[s].copy() for s in src]
        for d, sequence in zip(dst, moved, strict=True):
            self.truth[d] = sequence
        self.drop(dst)

    def reset(self, slots: Sequence[int]) -> None:
        self.cache.reset(slots)
        for slot in slots:
            if slot >= 0:
                self.truth[slot] = self.blank()
        self.drop(slots)

    def drop(self, slots: Sequence[int]) -> None:
        """These slots' drafts are gone."""
        if self.draft is not None:
            self.draft.dropped |= {slot for slot in slots if slot >= 0}

    # Comparisons -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """States, tails and the room that commit leaves, against the truth."""
        layout, slots = self.layout, range(self.slots)
        assert bool((self.cache.length + layout.max_draft <= layout.window).all())
        for layer in range(self.layers):
            self._close(self.cache.materialise(layer, slots), torch.stack([t.state[layer] for t in self.truth]))
            if layout.conv is not None:
                tails = torch.stack([t.tail[layer] for t in self.truth]).to(layout.dtype)
                assert torch.equal(self.cache.conv_tail(layer, slots).cpu(), tails)

    def _run(self, layer: int) -> tuple[Tensor, Tensor | None]:
        draft = self.draft
        assert draft is not None
        conv = None
        if self.layout.conv is not None:
            taps, bias, x = (t[layer].to(self.device) for t in (self.taps, self.bias, draft.x))
            conv = conv_step(self.cache[layer], x, taps, bias, draft.rows)
        return step(self.cache[layer], put(draft.inputs[layer], self.device), draft.rows), conv

    def _expect_outputs(self, layer: int) -> list[Tensor]:
        """Compare a layer's outputs; return the true states after each row's tokens."""
        draft = self.draft
        assert draft is not None
        out, conv = draft.outputs[layer]
        want = torch.zeros(out.shape, dtype=torch.float64)
        want_conv = None if conv is None else torch.zeros(conv.shape, dtype=torch.float64)
        states = []
        for r, slot in enumerate(draft.slots):
            places = chain(draft.rows, r)
            if slot < 0:
                states.append(torch.empty(0))
                continue
            parents = None if draft.parents is None else [draft.parents[n] for n in places]
            truth = self.truth[slot]
            want[places], after = token_loop(
                self.layout, take(draft.inputs[layer], places), truth.state[layer], parents
            )
            states.append(after)
            if want_conv is not None:
                for t, n in enumerate(places):
                    line = draft.x[layer][[places[i] for i in draft.line(r, t)]]
                    want_conv[n] = causal_conv(line, truth.tail[layer], self.taps[layer], self.bias[layer], "silu")[-1]
        self._close(out, want)
        if conv is not None and want_conv is not None:
            self._close(conv, want_conv)
        return states

    def _close(self, got: Tensor, want: Tensor) -> None:
        error = (got.cpu().double() - want).abs() / want.abs().clamp(min=1)
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= TOLERANCE[self.layout.dtype], worst


def conv_layout(layout: Layout, channels: int = 3, width: int = 4) -> Layout:
    """The layout with a short convolution."""
    return replace(layout, conv=Conv(channels, width))
