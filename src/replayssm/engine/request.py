"""What is asked of an engine, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from replayssm import ReplayError, checks

from .adapt import Acceptance
from .runner import Snapshot
from .text import TextStream

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Params:
    """How a request is continued.

    Attributes:
        max_tokens: most new tokens; None: until the sequence has the engine's ``max_length``.
        temperature: 0 is greedy; above, tokens are drawn from softmax(logits / temperature).
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that together have this probability; 1: from all.
        min_p: leave out tokens with less than this part of the likeliest token's probability.
        repetition_penalty: divides the positive logits of tokens that are in the text, and multiplies negative ones.
        presence_penalty: subtracted from the logits of tokens that were generated.
        frequency_penalty: subtracted as often as the token was generated.
        seed: of the draws; None: the engine's seed and the request's number. The same seed draws the same text,
            whatever else is in the batch and whoever drafts.
        stop: strings at which the text ends, themselves excluded.
        stop_tokens: token ids that end the text, besides the model's own.
        ignore_eos: go on after the model's end-of-text tokens.
        logprobs: for each new token, its log-probability and those of so many likeliest ones; None: do not.
        n: samples of the prompt, which is computed once.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, low in (("max_tokens", 1), ("seed", 0), ("logprobs", 0), ("n", 1)):
            value = getattr(self, name)
            if value is not None or name == "n":
                checks.integer(name, value, low)
        checks.integer("top_k", self.top_k, 0, 2**31 - 1)
        ranges = {
            "temperature": (0.0, float("inf")),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.0, float("inf")),
            "presence_penalty": (-float("inf"), float("inf")),
            "frequency_penalty": (-float("inf"), float("inf")),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            open_end = low == value and name in ("top_p", "repetition_penalty")
            if not math.isfinite(value) or not low <= value <= high or open_end:
                raise ReplayError(f"{name}: expected a finite number in {low}…{high}, got {value}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        for token in self.stop_tokens:
            checks.integer("stop_tokens", token, 0)
        if not all(isinstance(stop, str) for stop in self.stop):
            raise ReplayError(f"stop: expected strings, got {self.stop}")
        if "" in self.stop:
            raise ReplayError("stop: an empty string would end every text")

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        neutral = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != neutral


class Logprob(NamedTuple):
    """Log-probabilities at one token, before temperature and penalties.

    Attributes:
        value: of the token that was taken.
        top: the likeliest tokens and theirs.
    """

    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sample:
    """One continuation of a request's prompt.

    Attributes:
        request: whose.
        index: 0…n−1.
        seed: of its draws.
        tokens: new tokens, the one that ended the text included.
        finish: why it ended: "stop", "length", "cancelled" or "error"; None while it runs.
        logprobs: one entry a token, if they were asked for.
        drafted: tokens that were drafted for it.
        accepted: how many of these it took.
        steps: forwards that brought it tokens.
    """

    request: Request
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    # The engine's own: where the sequence is, how much of it is computed, and what of it was told.
    known: list[int] = field(default_factory=list, repr=False)
    computed: int = field(default=0, repr=False)
    slot: int | None = field(default=None, repr=False)
    parked: Sequence[Snapshot] | None = field(default=None, repr=False)
    stream: TextStream | None = field(default=None, repr=False)
    acceptance: Acceptance = field(default_factory=Acceptance, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """Names it among an engine's sequences."""
        return self.request.id, self.index

    @property
    def text(self) -> str:
        """The new text, without stop string and stop token. Needs the engine's tokenizer."""
        if self.stream is None:
            raise ReplayError("text: the engine has no tokenizer; give it one, or read tokens")
        return self.stream.text

    @property
    def decoding(self) -> bool:
        """Whether all but its last token is computed."""
        return self.computed == len(self.known) - 1 and bool(self.tokens)


@dataclass(eq=False)
class Request:
    """A prompt that was handed to an engine.

    Attributes:
        id: counts the engine's requests.
        prompt: token ids.
        params: how it is continued.
        priority: requests with a higher one go first, and take slots from lower ones.
        samples: ``params.n`` continuations.
        error: what went wrong, if a sample finished with "error".
    """

    id: int
    prompt: list[int]
    params: Params
    priority: int = 0
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> list[int]:
        """New tokens of the first sample."""
        return self.samples[0].tokens

    @property
    def text(self) -> str:
        """New text of the first sample."""
        return self.samples[0].text

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish is not None for sample in self.samples)


class Event(NamedTuple):
    """News of a sample.

    Attributes:
        sample: whose.
        tokens: new ones.
        text: what is certain of the new text; "" without a tokenizer.
        finish: why it ended, with the last event.
    """

    sample: Sample
    tokens: list[int]
    text: str
    finish: Finish | None

    @property
    def request(self) -> Request:
        """The request of the sample."""
        return self.sample.request
