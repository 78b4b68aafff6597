"""Who guesses the next tokens: the model's own multi-token-prediction head, for all sequences at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from replayssm import ReplayError, Rows

from .attention import KeyValues, Span
from .binding import packed
from .drafters import Ask, Seen
from .grow import Growing
from .mtp_head import MtpHead
from .packed import PackedCache, Plan
from .tree import Draft

# Hidden states of a sequence that wait for their next tokens, or for the next draft; more are read at once.
WAITING = 64


@dataclass
class _Text:
    """What the head knows of a sequence.

    Attributes:
        slot: where its keys are.
        start: position of the first hidden state that was seen. What is before it the head does not know.
        read: pairs of a hidden state and the next token whose keys are in the slot.
        waiting: hidden states [n, hidden_size] that follow.
        said: the head's own: after the text [1, hidden_size], and after each token of the draft.
    """

    slot: int
    start: int
    read: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    said: Tensor | None = None

    @property
    def seen(self) -> int:
        """Position after the last hidden state."""
        return self.start + self.read + sum(len(part) for part in self.waiting)


@dataclass(frozen=True)
class _Feed:
    """What a sequence brings to a forward of the head.

    Attributes:
        span: where its keys go.
        first: position of its first hidden state.
        tokens: after the hidden states.
        hidden: [n, hidden_size].
    """

    span: Span
    first: int
    tokens: Sequence[int]
    hidden: Tensor


class MtpDrafter(Growing):
    """A drafter that reads the hidden states of the engine's model and adds one layer of its own.

    It has slots with the keys and values of that layer. Where a sequence goes on from states that were kept (a prompt
    that is reused, a return from preemption), the head knows what it has seen since.
    """

    def __init__(self, head: MtpHead, branches: Sequence[int] = (1,), *, cost: float = 0.3) -> None:
        """Draft with a head; the engine of its model binds it.

        Args:
            head: of the engine's model, see ``MtpHead.load``.
            branches: how many tokens to try after the text, after each of these, and so on; the last number goes on.
            cost: see ``Drafter``.
        """
        super().__init__(branches, cost)
        self.head = head
        self._keys: KeyValues | None = None
        self._texts: dict[Hashable, _Text] = {}
        self._free: list[int] = []

    @property
    def bytes(self) -> int:
        """Of the keys and values of all slots."""
        return 0 if self._keys is None else self._keys.bytes

    def bind(self, model: nn.Module, slots: int, max_length: int, max_draft: int) -> None:
        """See ``Drafter.bind``."""
        if self._keys is not None:
            raise ReplayError("drafter: another engine has this head; close that first")
        if model is not self.head.model:
            raise ReplayError("drafter: the head belongs to another model than the engine's")
        weight = next(self.head.parameters())
        shapes = {self.head.index: self.head.key_shape}
        self._keys = KeyValues(shapes, frozenset(), slots, max_length, weight.dtype, weight.device)
        self._rows = Rows.draft(torch.empty(0, dtype=torch.int32, device=weight.device), [])
        self._free, self._texts = list(range(slots))[::-1], {}

    def close(self) -> None:
        """See ``Drafter.close``."""
        self._keys = None
        self._texts.clear()

    def forget(self, key: Hashable) -> None:
        """See ``Drafter.forget``."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._free.append(text.slot)

    def observe(self, seen: Sequence[Seen]) -> None:
        """See ``Observer.observe``."""
        for each in seen:
            text = self._texts.get(each.key)
            if text is None or text.seen != each.start:
                self.forget(each.key)
                text = self._texts[each.key] = _Text(self._free.pop(), each.start)
            text.waiting.append(each.hidden)
        long = {each.key: each.tokens for each in seen if sum(map(len, self._texts[each.key].waiting)) > WAITING}
        self._take(long)
        for each in seen:
            for heir in each.heirs:
                self._copy(self._texts[each.key], heir)

    def _copy(self, text: _Text, heir: Hashable) -> None:
        assert self._keys is not None
        self.forget(heir)
        slot = self._free.pop()
        self._keys.copy(text.slot, slot, text.read)
        self._texts[heir] = _Text(slot, text.start, text.read, list(text.waiting))

    def _read(self, asks: Sequence[Ask]) -> list[Tensor | None]:
        """See ``Growing._read``."""
        # Without the hidden state before the last token there is nothing to go on from.
        known = {ask.key: ask.tokens for ask in asks if self._has_all(ask)}
        self._take(known)
        said = [self._texts[ask.key].said if ask.key in known else None for ask in asks]
        lines = iter(self.head.output(torch.cat(ends)) if (ends := [s for s in said if s is not None]) else ())
        return [None if s is None else next(lines)[None] for s in said]

    def _has_all(self, ask: Ask) -> bool:
        text = self._texts.get(ask.key)
        return text is not None and bool(text.waiting) and text.seen == len(ask.tokens) - 1

    def _take(self, texts: dict[Hashable, Sequence[int]]) -> None:
        """Put the waiting pairs of sequences, whose tokens these are, into their slots."""
        feeds, whose, at = [], [], 0
        for key, tokens in texts.items():
            text = self._texts[key]
            hidden, first = torch.cat(text.waiting), text.start + text.read
            after = tokens[first + 1 : first + 1 + len(hidden)]
            text.waiting = [hidden[len(after) :]] if len(after) < len(hidden) else []
            if after:
                feeds.append(_Feed(Span(text.slot, at, at + len(after), text.read), first, after, hidden[: len(after)]))
                whose.append(text)
                at += len(after)
        if feeds:
            said = self._forward(feeds)
            for text, feed in zip(whose, feeds, strict=True):
                text.read += feed.span.count
                text.said = said[feed.span.stop - 1 : feed.span.stop]

    def _step(self, asks: Sequence[Ask], drafts: Sequence[Draft], wanted: Sequence[int]) -> Tensor:
        """See ``Growing._step``."""
        feeds, at = [], 0
        for ask, draft in zip(asks, drafts, strict=True):
            text = self._texts[ask.key]
            assert text.said is not None
            # Of a chain, the slot still has the keys of the tokens before the last one.
            chain = draft.row_parents is None
            done = draft.size - 1 if chain else 0
            span = Span(text.slot, at, at + draft.size - done, text.read + done, None if chain else draft.parents)
            hidden = text.said[[parent + 1 for parent in draft.parents[done:]]]
            feeds.append(_Feed(span, text.start + text.read + done, draft.tokens[done:], hidden))
            at = span.stop
        said, fresh = self._forward(feeds), []
        for ask, feed, number in zip(asks, feeds, wanted, strict=True):
            text, new = self._texts[ask.key], said[feed.span.stop - number : feed.span.stop]
            assert text.said is not None
            text.said = torch.cat([text.said, new])
            fresh.append(new)
        return self.head.output(torch.cat(fresh))

    @torch.no_grad()
    def _forward(self, feeds: Iterable[_Feed]) -> Tensor:
        """What the head says [N, hidden_size]."""
        assert self._keys is not None
        feeds, device = list(feeds), self._rows.slots.device
        positions = [feed.first + depth for feed in feeds for depth in feed.span.depths()]
        tokens = torch.tensor([[token for feed in feeds for token in feed.tokens]], device=device)
        hidden = torch.cat([feed.hidden for feed in feeds])[None]
        view = PackedCache(Plan((), [feed.span for feed in feeds], self._rows, device), {}, self._keys)
        with packed([self.head.config], view):
            return self.head(tokens, hidden, torch.tensor([positions], device=device), view)[0]
