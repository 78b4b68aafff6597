"""Whole decode and verify steps of published sizes: replay against conventional, in the same engine and graphs.

Only the recurrent layers' kernels and cache differ: conventional decode reads and rewrites every state, conventional
speculation writes a state for each draft and looks at the accepted one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from replayssm.bench.models import build, raw_config
from replayssm.bench.rows import Row
from replayssm.bench.steady import ROOM, Steady, Way, Work, by_cycle
from replayssm.bench.timing import Setup, free
from replayssm.checks import ReplayError
from replayssm.engine import Engine, Params
from replayssm.layout import Precision

Note = Callable[[str], None]
# The memory that sequences may take, as a part of what is left beside the weights: graphs and activations need some.
USABLE = 0.9


class Bench:
    """One model and the figures of its steps.

    Attributes:
        name: of the model.
        device: "cuda" or "cpu".
        layers: how many of its layers; None: all.
    """

    def __init__(self, name: str, device: str, layers: int | None = None, note: Note = lambda text: None) -> None:
        """Build the model; ``note`` hears what happens."""
        self.name, self.device, self.layers, self.note = name, device, layers, note
        self._conventional: dict[Work, Row] = {}
        begin = time.perf_counter()
        self.model = build(name, device, layers, torch.bfloat16 if device == "cuda" else torch.float32)
        self.weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        note(f"{name}: {self.weights / 1e9:.2f} GB of weights built in {time.perf_counter() - begin:.1f} s")

    def decode(self, work: Work, cycles: int = 5, host: bool = False) -> Row:
        """A plain decode step both ways, and through ``Engine.step`` on the wall clock if ``host``."""
        parts = {"replay": self._measure("replay", work, cycles), "conventional": self._usual(work, cycles)}
        if host:
            parts["engine"] = self._tried("engine", work, lambda: {"ms": engine_ms(self.model, work)})
        row = self._row(work, parts)
        if host:
            row["ms_engine"] = parts["engine"].get("ms")
        return row

    def spec(self, work: Work, cycles: int = 5) -> Row:
        """A verify step both ways, and plain conventional decode beside it; tokens a second of all three."""
        parts = {
            "conventional": self._usual(work, cycles),
            "plain": self._usual(replace(work, draft=1, schedule=(1,)), cycles),
            "replay": self._measure("replay", work, cycles),
        }
        row = self._row(work, parts)
        ms, plain = row["ms"], parts["plain"].get("ms")
        row["ms_plain"] = plain
        row["tokens_per_second"] = work.batch * work.accepted / ms * 1e3 if ms else None
        if ms and plain and self.device == "cuda":
            row["ratio_plain"] = plain * work.accepted / ms
        return row

    def _usual(self, work: Work, cycles: int) -> Row:
        """The conventional way, measured once: it has no window and no precision."""
        work = replace(work, precision="fp32")
        if work not in self._conventional:
            self._conventional[work] = self._measure("conventional", work, cycles)
        return self._conventional[work]

    def _measure(self, way: Way, work: Work, cycles: int) -> Row:
        def measured() -> Row:
            steady = Steady(self.model, way, work)
            try:
                if way == "conventional":
                    steady.tune(Setup(self.device, budget_ms=30.0))
                times = steady.times(cycles)
                return {
                    "ms": statistics.median(by_cycle(times, work.cycle)),
                    "slowest": max(times),
                    "recurrent_bytes": steady.recurrent_bytes,
                    "key_bytes": steady.key_bytes,
                    "tiles": steady.tiles,
                }
            finally:
                steady.close()

        return self._tried(way, work, measured)

    def _tried(self, what: str, work: Work, measure: Callable[[], Row]) -> Row:
        """What ``measure`` finds; or {"problem": why there is nothing}: what else a row says stays worth having."""
        begin = time.perf_counter()
        try:
            row = measure()
        except Exception as problem:
            row = {"problem": in_words(problem)}
        if "problem" in row:
            free()  # only now: the exception held on to what was allocated
            self.note(f"  {what}, {work.draft} a step: {row['problem']}")
        else:
            self.note(f"  {what}, {work.draft} a step: {row['ms']:.3f} ms ({time.perf_counter() - begin:.0f} s)")
        return row

    def _row(self, work: Work, parts: dict[str, Row]) -> Row:
        replay, conventional = parts["replay"], parts["conventional"]
        row: Row = {
            "model": self.name,
            "note": raw_config(self.name)[1],
            "layers": self.layers,
            **asdict(work),
            "schedule": list(work.schedule),
            "accepted": work.accepted,
            "cycle": work.cycle,
            "ms": replay.get("ms"),
            "ms_slowest": replay.get("slowest"),
            "ms_conventional": conventional.get("ms"),
            "conventional_tiles": conventional.get("tiles"),
            "weight_bytes": self.weights,
        }
        if problems := {name: part["problem"] for name, part in parts.items() if "problem" in part}:
            row["problems"] = problems
        if row["ms"]:
            row["sequence_bytes"] = {"recurrent": replay["recurrent_bytes"], "keys": replay["key_bytes"]}
        if row["ms"] and row["ms_conventional"]:
            row["sequence_bytes"]["recurrent_conventional"] = conventional["recurrent_bytes"]
            row.update(concurrency(row, self.device))
            if self.device == "cuda":  # on the CPU the usual way is no fast one
                row["ratio"] = row["ms_conventional"] / row["ms"]
        return row


def in_words(problem: Exception) -> str:
    """Why there is no figure, in one line."""
    first = (str(problem).strip() or "no message").splitlines()[0][:300]
    if isinstance(problem, torch.OutOfMemoryError):
        return f"does not fit: {first}"
    return first if isinstance(problem, ReplayError) else f"{type(problem).__name__}: {first}"


def concurrency(row: Row, device: str) -> Row:
    """How many sequences fit beside the weights, and in the same memory against the conventional way."""
    each = row["sequence_bytes"]
    replay, conventional = (each[name] + each["keys"] for name in ("recurrent", "recurrent_conventional"))
    found = {
        "concurrency": conventional / replay,
        "concurrency_recurrent": each["recurrent_conventional"] / each["recurrent"],
    }
    if device == "cuda":
        room = (torch.cuda.get_device_properties(0).total_memory - row["weight_bytes"]) * USABLE
        found["sequences"] = int(room // replay)
        found["sequences_conventional"] = int(room // conventional)
    return found


def engine_ms(model: nn.Module, work: Work, steps: int = 20, warm: int = 3) -> float:
    """Median wall-clock milliseconds of ``Engine.step``, host and read-back of tokens included; plain decode."""
    settings: dict[str, Any] = {"window": work.window, "precision": Precision.preset(work.precision)}
    with Engine(model, slots=work.batch, max_length=work.context + ROOM, **settings) as engine:
        for _ in range(work.batch):
            engine.submit([1] * work.context, Params(max_tokens=ROOM, ignore_eos=True))
        engine.scheduler.admit()
        for sample in engine.scheduler.running:
            # As if the prompt were computed and its first token chosen.
            assert sample.slot is not None
            engine.runner.lengths[sample.slot] = sample.computed = work.context
            sample.tokens.append(1)
            sample.known.append(1)
        for pair in engine.runner.keys.layers.values():
            for tensor in pair:
                tensor.normal_()
        times = []
        for _ in range(warm + steps):
            begin = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[warm:])


def works(batches: Sequence[int], contexts: Sequence[int], precisions: Sequence[str], **options: Any) -> list[Work]:
    """The product of the lists; wrong numbers raise."""
    return [
        Work(batch, context, precision=Precision.preset(precision).name, **options)
        for precision in precisions
        for context in contexts
        for batch in batches
    ]
