"""New text from new tokens, and the strings at which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"


class TextStream:
    """Decodes token by token. A character of several tokens appears when it is complete.

    Attributes:
        text: so far, without the stop string.
        stopped: whether a stop string has come.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        """``tokenizer`` of transformers; ``stops`` may lie across tokens in any way."""
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        # Tokens from `_start` on are decoded together, because a token's text depends on its neighbours; the text of
        # those before `_done` is out.
        self._start = self._done = 0
        self._told = 0

    def push(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)
        self._decode(final=False)

    def end(self) -> None:
        """No more tokens: what is incomplete stays as it is."""
        if not self.stopped:
            self._decode(final=True)

    def news(self, final: bool) -> str:
        """Text that was not told yet and that no stop string can take back."""
        held = 0 if final or self.stopped else self._held()
        told, self._told = self._told, max(self._told, len(self.text) - held)
        return self.text[told : self._told]

    def _decode(self, final: bool) -> None:
        before = self._text(self._tokens[self._start : self._done])
        after = self._text(self._tokens[self._start :])
        if len(after) <= len(before) or (after.endswith(_BROKEN) and not final):
            return
        self._start, self._done = self._done, len(self._tokens)
        self._append(after[len(before) :])

    def _append(self, more: str) -> None:
        first = max(0, len(self.text) - max((len(stop) for stop in self._stops), default=0) + 1)
        self.text += more
        found = [at for stop in self._stops if (at := self.text.find(stop, first)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(self.text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(self.text[-n:]) for stop in self._stops)), 0)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
