"""One recurrent layer under every policy, a chunk of the text at a time.

The rows of the batch are the texts of the first policy, then those of the second, and so on: what is not recurrent
treats them as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm import Layout, Precision, ReplayCache, Rows, step
from replayssm.drift.loop import Loop
from replayssm.drift.policies import Policy
from replayssm.integrations.transformers.scan import Scan

MOST = 16
"""Tokens that one step of a cache brings at most."""


class Lane(Protocol):
    """The states of one policy's texts."""

    def run(self, scan: Scan) -> Tensor:
        """Outputs [B, T, H, P] of the next T tokens."""
        ...

    def check(self) -> None:
        """Raise for what went wrong on the device, if it waits to be asked."""


class Replayed:
    """A policy's texts in the library's own cache: ``step`` and ``commit`` of several tokens each, on its kernels.

    Within a window every output reads the checkpoint, or the copy, as of the last fold, and rows fold when the window
    is full. Steps of n tokens, where n divides the window, find the same checkpoint at every token and fold after the
    same tokens as plain decoding does, one by one: they are equal to it, to the rounding of float32 sums.
    """

    def __init__(self, layout: Layout, rows: int, device: torch.device, seed: int) -> None:
        """An empty cache of so many rows."""
        self.tokens = layout.max_draft
        self.cache = ReplayCache.allocate(layout, layers=1, slots=rows, device=device, seed=seed)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.accepted = torch.full_like(slots, self.tokens)
        self.rows = Rows.draft(slots, self.accepted)

    def run(self, scan: Scan) -> Tensor:
        """See ``Lane``; T is a multiple of the tokens of a step."""
        out = []
        for block in scan.blocks(self.tokens):
            out.append(step(self.cache[0], block.inputs(), self.rows).unflatten(0, (scan.batch, self.tokens)))
            self.cache.commit(self.rows, self.accepted)
        return torch.cat(out, 1)

    def check(self) -> None:
        """See ``Lane``."""
        self.cache.check()


def step_tokens(window: int) -> int:
    """Tokens of a step: the most that divide the window, fill at most half of it and are at most 16."""
    return max(n for n in range(1, MOST + 1) if gcd(n, window) == n and (2 * n <= window or n == 1))


class Layer:
    """The lanes of one layer, and the float64 recurrence of the same inputs beside them.

    Attributes:
        recurrence: its title; "" before the first chunk.
        truth: outputs [B, T, H, P] of the last chunk in float64, for the inputs that each policy's rows had.
        out: those of the policies, in the activation dtype.
    """

    def __init__(self, policies: list[Policy], texts: int, window: int, seed: int) -> None:
        """Nothing is allocated before the first chunk."""
        self.policies, self.texts, self.window, self.seed = policies, texts, window, seed
        self.recurrence = ""
        self.truth = self.out = torch.empty(0)

    def advance(self, scan: Scan, group: Any = None, index: int = 0) -> Tensor:
        """Outputs of a chunk under every policy. Takes the place of ``ReplayLayer.advance``."""
        if not self.recurrence:
            self._start(scan)
        self.out, self.truth = self._run(scan)
        return scan.finish(self.out)

    def check(self) -> None:
        """Raise for what went wrong on the device."""
        for lane in self.lanes:
            lane.check()

    def _start(self, scan: Scan) -> None:
        self.recurrence = scan.recurrence.title
        first, seed = scan.tokens[0], self.seed
        layout = Layout(scan.recurrence, *scan.sizes, self.window, step_tokens(self.window), first.dtype)
        self.lanes: list[Lane] = [
            Loop(layout, self.texts, p.precision, first.device, seed)
            if p.conventional
            else Replayed(replace(layout, precision=p.precision), self.texts, first.device, seed)
            for p in self.policies
        ]
        self.exact = Loop(layout, scan.batch, Precision(), first.device, wide=torch.float64)
        self._run: Callable[[Scan], tuple[Tensor, Tensor]] = self._lanes
        if scan.tokens[0].device.type == "cuda":
            self._run = Captured(self._lanes)

    def _lanes(self, scan: Scan) -> tuple[Tensor, Tensor]:
        works = [(lane, scan.rows(i * self.texts, (i + 1) * self.texts)) for i, lane in enumerate(self.lanes)]
        *outs, truth = side_by_side([(lane.run, part) for lane, part in works] + [(self.exact.run, scan)])
        return torch.cat([out.to(scan.tokens[0].dtype) for out in outs]), truth


def side_by_side(calls: list[tuple[Callable[[Scan], Tensor], Scan]]) -> list[Tensor]:
    """The results of functions that do not wait for each other: on streams of their own while a graph is captured."""
    if not calls[0][1].tokens[0].is_cuda or not torch.cuda.is_current_stream_capturing():
        return [function(scan) for function, scan in calls]
    main, found = torch.cuda.current_stream(), []
    streams = [torch.cuda.Stream() for _ in calls]
    for stream, (function, scan) in zip(streams, calls, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            found.append(function(scan))
    for stream in streams:
        main.wait_stream(stream)
    return found


class Captured:
    """A function of a scan as a CUDA graph, from the second call on; the first one warms kernels up.

    Chunks of another length than the second one's run without the graph.
    """

    def __init__(self, function: Callable[[Scan], tuple[Tensor, Tensor]]) -> None:
        """Nothing is captured yet."""
        self.function, self.calls = function, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, scan: Scan) -> tuple[Tensor, Tensor]:
        """What the function returns; a later call overwrites it."""
        self.calls += 1
        if self.calls == 2:
            self._capture(scan)
        if self.graph is None or scan.count != self.scan.count:
            return self.function(scan)
        self.scan.fill(scan)
        self.graph.replay()
        return self.found

    def _capture(self, scan: Scan) -> None:
        self.scan = scan.copied()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.found = self.function(self.scan)
