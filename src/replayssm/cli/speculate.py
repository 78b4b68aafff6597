"""What ``--speculate`` says: where drafts come from, and how many tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .common import UserError

if TYPE_CHECKING:
    from replayssm.engine import Drafter

FORMS = "lookup:8, suffix:8, mtp:3, assistant:PATH:4 or off"
DRAFTS = {"lookup": 8, "suffix": 8, "mtp": 3, "assistant": 4}
MOST = 256
"""More drafts at a time than any model accepts."""


@dataclass(frozen=True)
class Speculation:
    """Where drafts come from.

    Attributes:
        kind: "lookup" copies what followed the last tokens earlier in the text, "suffix" what followed the longest end
            of the text that came before; "mtp" asks the model's own multi-token-prediction head, "assistant" a smaller
            model.
        drafts: most tokens drafted at a time; 0 for "off".
        assistant: name or folder of the smaller model.
    """

    kind: Literal["off", "lookup", "suffix", "mtp", "assistant"] = "off"
    drafts: int = 0
    assistant: str | None = None

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Read ``off``, ``lookup[:N]``, ``suffix[:N]``, ``mtp[:N]`` or ``assistant:PATH[:N]``."""
        kind, _, rest = text.partition(":")
        if kind == "off" and not rest:
            return cls()
        if kind in ("lookup", "suffix", "mtp"):
            return cls(kind, _count(text, rest, kind))
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

    @property
    def engine_only(self) -> bool:
        """Whether ``model.generate`` does not know these drafts, and an engine does."""
        return self.kind in ("suffix", "mtp")

    def drafter(self, model: Any, assistant: Any | None) -> Drafter | None:
        """Who drafts in an engine. ``assistant`` is the loaded smaller model.

        Raises:
            ReplayError: the model has no multi-token-prediction head.
        """
        from replayssm.engine import DraftModel, MtpDrafter, MtpHead, PromptLookup, SuffixLookup

        if self.kind == "lookup":
            return PromptLookup()
        if self.kind == "suffix":
            return SuffixLookup()
        if self.kind == "mtp":
            return MtpDrafter(MtpHead.load(model))
        return DraftModel(assistant) if assistant is not None else None

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
