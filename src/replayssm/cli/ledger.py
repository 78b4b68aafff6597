"""What a generation really did: counted from the caches' own ``length`` and ``folds``, forward by forward.

A forward of an attached model first commits what the one before it brought (and folds if the buffer is full), then
steps its own tokens. So after each forward the bookkeeping tells how many entries the step found, how many tokens were
accepted since, and whether they were folded. Bytes follow from these counts by docs/planning.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replayssm.cache import ReplayCache
from replayssm.layout import Layout
from replayssm.plan.traffic import Traffic, entry_bytes, fold, replay_read

if TYPE_CHECKING:
    from replayssm.engine import Engine


@dataclass
class Track:
    """Counts for the layers that share one cache, for the sequence in slot 0.

    Attributes:
        layers: that share it.
        steps: verifying or decoding steps.
        folds: rewrites of the checkpoint.
        moved: bytes read and written by all its layers.
    """

    layout: Layout
    layers: int
    steps: int = 0
    folds: int = 0
    moved: Traffic = field(default_factory=Traffic)
    # After the last forward: tokens committed, `length`, `folds`, and whether its tokens went through a step.
    _before: tuple[int, int, int, bool] | None = None

    def observe(self, cache: ReplayCache, tokens: int, committed: int) -> None:
        """Take note of a forward with so many tokens, after which so many tokens of the sequence are committed."""
        length, folds = int(cache.length[0]), int(cache.folds[0])
        self.layout = cache.layout
        stepped = tokens <= self.layout.max_draft
        if self._before is not None:
            gained = committed - self._before[0]
            if not self._before[3] and gained:
                self._step(0, gained)
            if folds > self._before[2]:
                self._fold(self._before[1] + gained - length)
        if stepped:
            self._step(length, tokens)
        self._before = committed, length, folds, stepped

    def _step(self, length: int, tokens: int) -> None:
        self.steps += 1
        written = Traffic(write=sum(entry_bytes(self.layout).values()) * tokens)
        self.moved += (replay_read(self.layout, length) + written) * self.layers

    def _fold(self, entries: int) -> None:
        self.folds += 1
        self.moved += fold(self.layout, entries) * self.layers


def pools(output: Any) -> tuple[Any, list[Any]]:
    """The cache in a model's output, and what holds its recurrent states: one pool for the layers of each shape."""
    cache = next(output[name] for name in ("cache", "past_key_values", "cache_params") if output.get(name) is not None)
    found = {id(layer.pool): layer.pool for layer in cache.layers if getattr(layer, "pool", None) is not None}
    return cache, list(found.values())


class Ledger:
    """Watches the forwards of an attached model while it is a context manager's value.

    Attributes:
        forwards: tokens of each forward, the prompt's first.
        times: the clock after each forward.
        tracks: the counts, one for the layers of each shape.
    """

    def __init__(self, model: Any) -> None:
        """Watch this model."""
        self.forwards: list[int] = []
        self.times: list[float] = []
        self.tracks: list[Track] = []
        self._model = model
        self._cache: Any = None

    def __enter__(self) -> Ledger:
        self.start = time.perf_counter()
        self._hook = self._model.register_forward_hook(self._after, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop = time.perf_counter()
        self._hook.remove()

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tokens = kwargs["input_ids"].shape[1]
        self.forwards.append(tokens)
        self.times.append(time.perf_counter())
        self._cache, found = pools(output)
        self.tracks = self.tracks or [Track(pool.cache.layout, pool.cache.layers) for pool in found]
        for pool, track in zip(found, self.tracks, strict=True):
            most = track.layout.max_draft
            # A prompt is scanned, not stepped; its last tokens stay out of the checkpoint where drafts may be taken
            # back.
            later = tokens if tokens <= most else most if most > 1 else 0
            track.observe(pool.cache, tokens, pool.seen - later)

    def report(self, prompt: int, generated: int) -> dict[str, Any]:
        """The counts in plain values: tokens, seconds and bytes, for one sequence.

        Args:
            prompt: tokens of the prompt.
            generated: tokens that came out.
        """
        moved = sum((track.moved for track in self.tracks), Traffic())
        # Conventional decoding reads and rewrites the state for every token after the first; stock keeps it in float32.
        states = sum(t.layers * t.layout.heads * t.layout.head_dim * t.layout.state_dim * 4 for t in self.tracks)
        conventional = states * max(0, generated - 1)
        seconds = self.stop - self.start
        return {
            "prompt_tokens": prompt,
            "tokens": generated,
            "seconds": seconds,
            "prompt_seconds": self.times[0] - self.start,
            "tokens_per_second": generated / seconds,
            "model_steps": len(self.forwards),
            "folds": max((track.folds for track in self.tracks), default=0),
            "drafts": {
                # The first forward brings the prompt and drafts, each other one the last token and drafts; each
                # forward yields one token of its own beside the accepted drafts.
                "proposed": sum(self.forwards) - prompt - (len(self.forwards) - 1),
                "accepted": generated - len(self.forwards),
            },
            "state_bytes": {
                "read": round(moved.read),
                "written": round(moved.write),
                "conventional_read": conventional,
                "conventional_written": conventional,
            },
            "sequence_bytes": self._sizes(),
        }

    def _sizes(self) -> dict[str, int]:
        """Bytes that the sequence takes, by what they are for."""
        sizes: dict[str, int] = dict.fromkeys(("checkpoint", "read_copy", "buffer", "convolution", "kv"), 0)
        for track in self.tracks:
            for name, spec in track.layout.tensors.items():
                kinds = {"checkpoint": "checkpoint", "read_copy": "read_copy", "conv": "convolution"}
                kind = next((kind for start, kind in kinds.items() if name.startswith(start)), "buffer")
                sizes[kind] += spec.nbytes * track.layers
        for layer in self._cache.layers if self._cache is not None else ():
            sizes["convolution"] += sum(t.nbytes for t in getattr(layer, "conv_states", {}).values() if t is not None)
            sizes["kv"] += sum(t.nbytes for name in ("keys", "values") if (t := getattr(layer, name, None)) is not None)
        return sizes


class EngineLedger(Ledger):
    """The same for the only sequence of an engine, whose prompt is one forward."""

    def __init__(self, engine: Engine) -> None:
        """Watch this engine."""
        super().__init__(engine.runner.model)
        self._engine = engine

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tokens, runner = kwargs["input_ids"].shape[1], self._engine.runner
        self.forwards.append(tokens)
        self.times.append(time.perf_counter())
        self.tracks = self.tracks or [Track(pool.layout, pool.layers) for pool in runner.pools]
        for pool, track in zip(runner.pools, self.tracks, strict=True):
            # A step is committed after it; the state of a scanned prompt is loaded within the forward.
            track.observe(pool, tokens, runner.lengths[0] + (tokens if tokens > pool.layout.max_draft else 0))

    def _sizes(self) -> dict[str, int]:
        sizes = super()._sizes()
        sizes["kv"] = self._engine.runner.keys.bytes + getattr(self._engine.drafter, "bytes", 0)
        return sizes
