"""A model as a list of blocks: what each keeps per sequence and how many weights it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from replayssm.checks import ReplayError
from replayssm.layout import Layout

Kind = Literal["recurrent", "attention", "sliding", "mla", "mlp", "moe"]


@dataclass(frozen=True)
class Block:
    """One mixer or one feed-forward part of a decoder layer. Two equal blocks cost the same.

    Attributes:
        kind: what it is.
        params: weights that every token reads (elements).
        experts: routed experts; 0 unless `kind` is "moe".
        experts_per_token: routed experts that one token uses.
        expert_params: weights of one routed expert (elements).
        stored: share of `params` kept for this block alone; below 1 where layers share one set of weights.
        layout: sizes of a recurrent block; window, draft and precision are replaced by those of the question asked.
        kv_elements: elements that attention keeps per token: keys and values, or the latent of MLA.
        keeps: most tokens kept (sliding window); None keeps them all.
        reads: most tokens read in a step (top-k selection); None reads all that are kept.
    """

    kind: Kind
    params: int
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    stored: float = 1.0
    layout: Layout | None = None
    kv_elements: int = 0
    keeps: int | None = None
    reads: int | None = None

    @property
    def params_stored(self) -> float:
        """Weights in memory (elements)."""
        return self.params * self.stored + self.experts * self.expert_params

    @property
    def params_active(self) -> int:
        """Weights that one token multiplies with (elements)."""
        return self.params + self.experts_per_token * self.expert_params

    def params_read(self, tokens: int) -> float:
        """Weights that a step of `tokens` tokens reads (elements): an expert is read if any token picks it."""
        if not self.experts:
            return self.params
        # Tokens are taken to pick experts independently and evenly.
        touched = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)
        return self.params + touched * self.expert_params

    def kv_kept(self, context: int) -> int:
        """Elements kept for a sequence of `context` tokens."""
        return self.kv_elements * min(context, self.keeps or context)

    def kv_read(self, context: int) -> int:
        """Elements read by one step of a sequence of `context` tokens."""
        return self.kv_elements * min(context, self.reads or self.keeps or context)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, from its Hugging Face config.

    Attributes:
        name: what tables call it.
        model_type: the config's own word.
        hidden: width of the residual stream.
        blocks: mixers and feed-forward parts, in order.
        embedding_params: embedding tables (elements): in memory, but a step reads only a row per token.
        head_params: the output projection (elements), read in every step.
        tied: the output projection is the embedding table, so memory holds it once.
        source: where the sizes come from.
    """

    name: str
    model_type: str
    hidden: int
    blocks: tuple[Block, ...]
    embedding_params: int
    head_params: int
    tied: bool
    source: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | object, name: str = "", source: str = "") -> ModelShape:
        """Read a config: a dict (config.json) or a transformers config object, nested `text_config` included.

        Raises `ReplayError` for a model whose recurrence this library does not implement.
        """
        from .families import parse

        return replace(parse(Config(config), name), source=source)

    @property
    def recurrent(self) -> tuple[Block, ...]:
        """The blocks that this library decodes."""
        return tuple(block for block in self.blocks if block.layout is not None)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """One layout per recurrent block, in order."""
        return tuple(block.layout for block in self.blocks if block.layout is not None)

    @property
    def params_total(self) -> float:
        """Weights in memory (elements)."""
        head = 0 if self.tied else self.head_params
        return self.embedding_params + head + sum(block.params_stored for block in self.blocks)

    @property
    def params_active(self) -> int:
        """Weights that one token multiplies with (elements), without the embedding table."""
        return self.head_params + sum(block.params_active for block in self.blocks)

    def params_read(self, tokens: int) -> float:
        """Weights that a step of `tokens` tokens reads (elements)."""
        return self.head_params + sum(block.params_read(tokens) for block in self.blocks)

    def groups(self) -> list[tuple[Block, int]]:
        """Equal blocks counted together, in order of first appearance."""
        return list(Counter(self.blocks).items())


class Config:
    """Attribute access over a dict or an object: the text model's part, several spellings, a clear error."""

    def __init__(self, raw: Mapping[str, Any] | object):
        self._raw = raw
        outer_type = self.get("model_type", default=None)
        nested = self.get("text_config", "llm_config", default=None)
        if nested is not None:
            self._raw = nested
        self.model_type = str(self.get("model_type", default=None) or outer_type or "")
        if not self.model_type:
            raise ReplayError("config: `model_type` is missing, so this is not a Hugging Face model config")

    def get(self, *names: str, default: Any = ...) -> Any:
        """The first of `names` that is set; `default` if none is, or an error if there is no default."""
        for name in names:
            value = self._raw.get(name) if isinstance(self._raw, Mapping) else getattr(self._raw, name, None)
            if value is not None:
                return value
        if default is ...:
            raise ReplayError(f"config of type {self.model_type!r}: `{names[0]}` is missing")
        return default

    def int(self, *names: str, default: Any = ...) -> int:
        """As `get`, but the value must be a whole number."""
        value = self.get(*names, default=default)
        if value is None:
            return self.get(*names)  # no default after all: says what is missing
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ReplayError(f"config of type {self.model_type!r}: `{names[0]}` must be a whole number, got {value!r}")
        return value
