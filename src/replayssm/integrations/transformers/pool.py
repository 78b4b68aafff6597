"""The replayed state of the layers that share one shape, for one batch: a ``ReplayCache`` and when to commit it.

transformers does not say which tokens of a forward are accepted. It says so afterwards, with ``crop``, or it never says
and all are. So a forward's tokens are committed at the beginning of the next one, and ``crop`` only makes the number
smaller. While ``activate_past_recording`` is in force, forwards may follow each other without a crop (an assistant
model drafting): then the last ``max_draft`` tokens stay uncommitted, and each step repeats those that wait.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm import ReplayCache, ReplayError, Rows, step

from .scan import Scan, Settings

if TYPE_CHECKING:
    from .cache import ReplayLayer


class Pool:
    """Slots are the rows of the batch.

    Attributes:
        settings: of ``attach``.
        layers: the cache layers, in the model's order. The first one speaks for all.
        cache: the core's cache; None before the first forward.
        seen: tokens of a row, padding included.
    """

    def __init__(self, settings: Settings, layers: list[ReplayLayer]) -> None:
        """Empty: the first forward tells the batch."""
        self.settings = settings
        self.layers = layers
        self.cache: ReplayCache | None = None
        self.seen = 0
        self._fresh = True  # no forward came yet
        self._empty = True  # the running forward starts from no state, which stock prefills do without
        self._waiting: list[Scan | None] = [None] * len(layers)  # raw tokens that may still be taken back
        self._pending = 0  # their number a row; also where they are not kept, in plain decode
        self._stepped: Rows | None = None  # None: the pending tokens came with a prefill and no step has seen them
        self._settled = True  # a crop has confirmed the pending tokens
        self._keep = self._tail = 0  # plan of the running forward

    def begin(self, scan: Scan, recording: bool) -> None:
        """A forward starts: commit what the last one brought and plan this one. Called by the first layer."""
        layout = self.settings.layout(scan.recurrence, scan.sizes, scan.tokens[0].dtype, drafting=recording)
        limit = layout.max_draft
        self._keep = max(0, min(self._pending, limit - scan.count)) if recording and not self._settled else 0
        self._commit(self._pending - self._keep)
        if self.cache is None or (self._fresh and self.cache.slots != scan.batch):
            self._start(scan, ReplayCache.allocate(layout, len(self.layers), scan.batch, scan.tokens[0].device))
        assert self.cache is not None
        self._empty, self._fresh = self._fresh, False
        if self.cache.layout != layout:
            self._move(layout, torch.arange(scan.batch))
        by_step = scan.count <= limit
        self._tail = 0 if by_step or not recording else limit
        self._pending = self._keep + scan.count if by_step else self._tail
        self._stepped = Rows.draft(self._slots, [self._pending] * scan.batch) if by_step else None
        if not by_step:
            # `load` empties the buffers of all layers: what they hold has to be in the checkpoints before.
            self.cache.fold(self._slots)
        self._settled = not recording
        self.seen += scan.count

    def run(self, index: int, scan: Scan) -> Tensor:
        """Outputs [B, T, H, P] of a layer's tokens, as ``begin`` planned."""
        if self._stepped is not None:
            return self._step(index, scan)
        assert self.cache is not None
        head = scan.count - self._tail
        state = None if self._empty else self.cache.materialise(index, self._slots)
        out, state = scan.part(0, head).chunked(state)
        self.cache.load(index, self._slots, state)
        if self._tail:
            tail = scan.part(head, scan.count)
            self._waiting[index] = tail.kept()
            out = torch.cat([out, tail.chunked(state)[0]], dim=1)
        return out

    def crop(self, removed: int) -> None:
        """Take back the last ``removed`` tokens of every row, and accept the others."""
        # What came before the past was recorded stays: stock has not kept its convolution inputs.
        allowed = 0 if self._waiting[0] is None else min(self._pending, self.settings.max_draft - 1)
        if removed > allowed:
            raise ReplayError(
                f"crop: cannot take back {removed} tokens, only {allowed}; attach the model with "
                f"max_draft={removed + 1} or more (prompt_lookup_num_tokens or num_assistant_tokens, and one)"
            )
        self._pending -= removed
        self.seen -= removed
        self._settled = True
        self._waiting = [None if scan is None else scan.part(0, self._pending) for scan in self._waiting]

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; the batch may grow or shrink."""
        self._commit(self._pending)
        if self.cache is None:
            return
        if len(rows) == self.cache.slots:
            self.cache.fork(rows.cpu(), self._slots)
        else:
            self._move(self.cache.layout, rows.cpu())

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        if self.cache is not None:
            self.cache.reset(self._slots)
        self._waiting = [None] * len(self.layers)
        self._pending = self.seen = 0
        self._stepped, self._settled, self._fresh = None, True, True

    def state(self, index: int) -> Tensor | None:
        """The state [B, H, P, K] of a layer after all its tokens, float32."""
        self._commit(self._pending)
        return None if self.cache is None else self.cache.materialise(index, self._slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        """The core's cache is copied with its own verbs; uncommitted tokens are stepped again from what is kept."""
        if self._waiting[0] is None:
            self._commit(self._pending)
        memo[id(self)] = twin = copy.copy(self)
        twin.layers = copy.deepcopy(self.layers, memo)
        twin._waiting = list(self._waiting)
        if self.cache is not None:
            twin._stepped = None
            twin.cache = ReplayCache.allocate(
                self.cache.layout, self.cache.layers, self.cache.slots, self.cache.device, self.cache.seed
            )
            twin.cache.import_(self._slots, self.cache.export(self._slots))
        return twin

    def _step(self, index: int, scan: Scan) -> Tensor:
        assert self.cache is not None
        assert self._stepped is not None
        waiting = self._waiting[index]
        whole = scan if not self._keep or waiting is None else scan.after(waiting)
        out = step(self.cache[index], whole.inputs(), self._stepped)
        out = out.unflatten(0, (whole.batch, whole.count))[:, self._keep :]
        self._waiting[index] = None if self._settled else whole.kept()
        if torch.is_grad_enabled() and any(t.requires_grad for t in scan.tokens):
            out = _NoGradient.apply(out, *scan.tokens)
        return scan.finish(out)

    def _commit(self, accepted: int) -> None:
        """Make the first ``accepted`` pending tokens part of their sequences; the others wait on."""
        if self.cache is None or (self._stepped is None and not accepted):
            return
        batch = self.cache.slots
        if self._stepped is None:
            self._stepped = Rows.draft(self._slots, [accepted] * batch)
            for index, scan in enumerate(self._waiting):
                assert scan is not None
                step(self.cache[index], scan.part(0, accepted).inputs(), self._stepped)
        self.cache.commit(self._stepped, [accepted] * batch)
        self._waiting = [None if scan is None else scan.part(accepted, scan.count) for scan in self._waiting]
        self._pending -= accepted
        self._stepped = None

    def _start(self, scan: Scan, cache: ReplayCache) -> None:
        """Take a new cache, and states that stock layers left."""
        self.cache = cache
        self._slots = torch.arange(cache.slots, dtype=torch.int32, device=cache.device)
        for index, layer in enumerate(self.layers):
            if (state := layer.take_stock_state()) is not None:
                cache.load(index, self._slots, scan.from_stock(state).float())
                self._fresh = False

    def _move(self, layout: Any, rows: Tensor) -> None:
        """Another layout or batch: row i of the new cache starts from the state of row ``rows[i]``."""
        old, before = self.cache, self._slots
        assert old is not None
        self.cache = ReplayCache.allocate(layout, len(self.layers), len(rows), old.device)
        self._slots = torch.arange(len(rows), dtype=torch.int32, device=old.device)
        for index in range(len(self.layers)):
            self.cache.load(index, self._slots, old.materialise(index, before)[rows.to(old.device)])


class _NoGradient(torch.autograd.Function):
    """The identity, for outputs whose gradient nobody computes: silence would be a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tokens: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ReplayError("replayed decode steps have no gradient; pass use_cache=False to train, or detach(model)")
