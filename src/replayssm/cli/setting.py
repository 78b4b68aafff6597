"""The model that a command runs, and how it decodes, whatever the prompts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replayssm.layout import Precision

from . import setup
from .common import UserError
from .speculate import Speculation

if TYPE_CHECKING:
    from replayssm.engine import Engine


@dataclass(frozen=True)
class Setting:
    """What the options of these names say.

    Attributes:
        model: a shipped name or a folder.
        window: None: 16 and the drafts; an engine chooses.
        threads: None: as ``setup.set_threads`` decides.
    """

    model: str
    dtype: str
    precision: str
    speculation: Speculation
    window: int | None
    threads: int | None

    @property
    def room(self) -> dict[str, Any]:
        """Window, drafts and precision as ``attach`` and ``Engine`` take them.

        Raises:
            ReplayError: no such precision.
        """
        policy = Precision.preset(self.precision)
        return {
            "window": self.speculation.window(self.window),
            "max_draft": self.speculation.max_draft,
            "precision": policy,
        }

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        target, tokenizer = setup.load(self.model, self.dtype)
        setup.set_threads(target, self.threads)
        return target, tokenizer

    def assistant(self, tokenizer: Any) -> Any | None:
        """The assistant model, if drafts come from one.

        Raises:
            UserError: its vocabulary is another one.
        """
        if self.speculation.assistant is None:
            return None
        found, own = setup.load(self.speculation.assistant, self.dtype)
        if own.get_vocab() != tokenizer.get_vocab():
            raise UserError(f"--speculate {self.speculation}: the assistant has another vocabulary than the model")
        return found

    def engine(self, target: Any, tokenizer: Any, **options: Any) -> Engine:
        """An engine with the drafter that was asked for."""
        from replayssm.engine import Engine

        drafter = self.speculation.drafter(target, self.assistant(tokenizer))
        room = {**self.room, "window": self.window}  # None: the engine chooses
        return Engine(target, tokenizer, drafter=drafter, **room, **options)
