"""What ``--speculate`` says: where drafts come from, and how many tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .common import UserError

FORMS = "lookup:8, assistant:PATH:4 or off"
DRAFTS = {"lookup": 8, "assistant": 4}
MOST = 256
"""More drafts at a time than any model accepts."""


@dataclass(frozen=True)
class Speculation:
    """Where drafts come from.

    Attributes:
        kind: "lookup" copies what followed the last tokens earlier in the text; "assistant" asks a smaller model.
        drafts: most tokens drafted at a time; 0 for "off".
        assistant: name or folder of the smaller model.
    """

    kind: Literal["off", "lookup", "assistant"] = "off"
    drafts: int = 0
    assistant: str | None = None

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Read ``off``, ``lookup[:N]`` or ``assistant:PATH[:N]``."""
        kind, _, rest = text.partition(":")
        if kind == "off" and not rest:
            return cls()
        if kind == "lookup":
            return cls("lookup", _count(text, rest, "lookup"))
        if kind == "assistant" and rest:
            path, colon, count = rest.rpartition(":")
            if colon and path and count.lstrip("-").isdigit():
                return cls("assistant", _count(text, count, "assistant"), path)
            return cls("assistant", DRAFTS["assistant"], rest)
        raise UserError(f"--speculate {text}: expected {FORMS}")

    def __str__(self) -> str:
        parts = [self.kind, self.assistant, self.drafts or None]
        return ":".join(str(part) for part in parts if part is not None)

    @property
    def max_draft(self) -> int:
        """Tokens that a verifying step brings: the drafts and the one before them."""
        return self.drafts + 1

    def window(self, given: int | None) -> int:
        """The window that was asked for; by default 16 committed entries and room for the drafts."""
        return 16 + self.drafts if given is None else given

    def options(self, assistant: Any | None) -> dict[str, Any]:
        """What ``model.generate`` takes. ``assistant`` is the loaded model; its own settings are set to fit."""
        if self.kind == "lookup":
            # A match of three tokens is followed before one of two or one: fewer drafts, and more of them right.
            return {"prompt_lookup_num_tokens": self.drafts, "max_matching_ngram_size": 3}
        if assistant is None:
            return {}
        config = assistant.generation_config
        # Always as many drafts as asked for: no heuristic changes the number, no threshold ends a draft early.
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = self.drafts, "constant"
        config.assistant_confidence_threshold = 0
        return {"assistant_model": assistant}


def _count(text: str, count: str, kind: str) -> int:
    if not count and not text.endswith(":"):
        return DRAFTS[kind]
    if not count.isdecimal() or not 1 <= int(count) <= MOST:
        raise UserError(f"--speculate {text}: expected 1…{MOST} drafts, got {count!r} ({FORMS})")
    return int(count)
