"""Layers of a transformers cache whose recurrent state is replayed.

A stock layer of a cache becomes one of these in place, at the first forward of an attached model (`adopt`). The
convolution's state stays where stock keeps and rolls it back; only the recurrent state moves to a ``Pool``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as once
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from replayssm import ReplayError

from .pool import Pool
from .scan import Scan, Settings


@dataclass(frozen=True)
class Group:
    """The layers of a model whose states have one shape: ``layers`` are their places in a cache."""

    settings: Settings
    layers: tuple[int, ...]


class ReplayLayer(LinearAttentionLayer):
    """Mixed into the stock classes of layers with a recurrent state (`adopt`).

    Attributes:
        siblings: all layers of the cache.
        pools: the pools of the cache, by the places of their layers.
        pool: of this layer, once an attached mixer has used it, and
        index: its place there.
    """

    siblings: list[Any]
    pools: dict[tuple[int, ...], Pool]
    pool: Pool | None
    index: int

    def advance(self, scan: Scan, group: Group, index: int) -> Tensor:
        """Outputs [B, T, H, P] of the tokens of a forward, which become part of this layer's sequences."""
        if self.pool is None:
            if group.layers not in self.pools:
                self.pools[group.layers] = Pool(group.settings, [self.siblings[i] for i in group.layers])
            self.pool, self.index = self.pools[group.layers], index
        if index == 0:
            self.pool.begin(scan, self.record_past)
        return self.pool.run(index, scan)

    def expect_batch(self, rows: int) -> None:
        """Raise if a batch has not the rows of the sequences that this layer holds."""
        conv = self.conv_states[0]
        if conv is None or conv.shape[0] == rows:
            return
        if self.has_previous_state[0]:
            raise ReplayError(f"the cache holds {conv.shape[0]} sequences, but the batch has {rows}")
        self.is_conv_states_initialized[0] = False  # after a reset: stock would keep the old batch's memory

    def state(self) -> Tensor | None:
        """The recurrent state [B, heads, head_dim, state_dim] after all tokens, float32; None before the first one."""
        return None if self.pool is None else self.pool.state(self.index)

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:  # type: ignore[override]
        """Stock mixers read this: they would go on from a state that is not there."""
        raise ReplayError(
            "the recurrent state of this cache is kept by replayssm (cache.layers[i].state() returns it); only the "
            "attached model can continue it: attach(model) again, or start from a new cache"
        )

    def take_stock_state(self) -> Tensor | None:
        """The state that a stock mixer left in this layer, once."""
        found: dict[int, Tensor | None] = vars(self)["recurrent_states"]
        state, found[0] = found[0], None
        self.is_recurrent_states_initialized[0] = False
        return state if self.has_previous_state[0] else None

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can put this layer back: always, by fewer than ``max_draft`` tokens."""
        return True

    @property
    def is_compileable(self) -> bool:
        """As stock's, but also while the past is recorded: attention masks of static caches depend on it."""
        return not isinstance(self, DynamicLayer)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of every row, in the attention part as well."""
        tokens_to_remove = int(tokens_to_remove)  # 5.17 passes a tensor
        if not self.record_past:
            raise RuntimeError(
                "`crop`: call `cache.activate_past_recording()` before the tokens that may be taken back"
            )
        if tokens_to_remove > 0:
            raise RuntimeError(f"`crop` takes a negative number of tokens to remove, got {tokens_to_remove}")
        if self._leads:
            self._pool.crop(-tokens_to_remove)
        for i, conv in self.conv_states.items():
            if conv is not None:
                stop = conv.shape[-1] + tokens_to_remove
                self.conv_states[i] = conv[..., max(0, stop - int(self.conv_kernel_size[i] or 0)) : stop]
        if (attention := _attention_class(type(self))) is not None:
            attention.crop(self, tokens_to_remove)  # type: ignore[attr-defined]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        if self._leads:
            self._pool.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, in this order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        for i, conv in self.conv_states.items():
            if conv is not None:
                self.conv_states[i] = conv.index_select(0, indices.to(conv.device))
        if self._leads:
            self._pool.reorder(indices)
        if (attention := _attention_class(type(self))) is not None:
            attention.batch_select_indices(self, indices)  # type: ignore[attr-defined]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        conv = self.conv_states[0]
        if conv is not None:
            self.batch_select_indices(torch.arange(conv.shape[0]).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget the sequences."""
        super().reset()
        if self._leads:
            self._pool.reset()

    @property
    def _pool(self) -> Pool:
        assert self.pool is not None
        return self.pool

    @property
    def _leads(self) -> bool:
        """Whether this layer speaks for its pool: `Cache` tells every layer, the pool has to hear it once."""
        return self.pool is not None and self.index == 0


def adopt(cache: Cache, layer: int) -> ReplayLayer | None:
    """Return the cache's layer, made a replayed one; None where it holds no recurrent state (the caller's mistake)."""
    layers = getattr(cache, "layers", [])
    if layer >= len(layers) or not isinstance(layers[layer], LinearAttentionLayer):
        return None
    if not isinstance(layers[layer], ReplayLayer):
        pools: dict[tuple[int, ...], Pool] = {}
        for each in layers:
            # All of them, also those that no mixer uses (5.17 has such in place of MLP layers): all get cropped.
            if isinstance(each, LinearAttentionLayer):
                each.__class__ = _mixed(type(each), ReplayLayer)
                each.siblings, each.pools, each.pool = layers, pools, None  # type: ignore[attr-defined]
        if not any(isinstance(each, CacheLayerMixin) for each in layers):
            cache.__class__ = _mixed(type(cache), _Counting)
    return layers[layer]


class _Counting(Cache):
    """Mixed into caches that have no attention layer: nothing in them knows the length, so stock raises."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row."""
        return next((layer.pool.seen for layer in self.layers if layer.pool is not None), 0)  # type: ignore[union-attr]

    @property
    def is_linear(self) -> list[bool]:
        """While the past is recorded, not so: `generate` then takes the tokens that the cache holds off its input."""
        return [not layer.record_past for layer in self.layers]  # type: ignore[union-attr]

    @property
    def is_compileable(self) -> bool:
        """Stock decides by the class whether to compile, and would for any but its own ones."""
        return False


@once
def _mixed(stock: type, mixin: type) -> type:
    return type(f"Replay{stock.__name__}", (mixin, stock), {"__module__": __name__})


@once
def _attention_class(layer: type) -> type | None:
    """The stock class of the attention part of a layer that has both."""
    linear = (c for c in layer.__mro__ if not issubclass(c, LinearAttentionLayer) and issubclass(c, CacheLayerMixin))
    return next(linear, None)
