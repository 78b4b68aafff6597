"""Caches that hold something."""

from __future__ import annotations

from replayssm import Layout, ReplayCache, Rows, step
from support.makers import generator, random_inputs, random_state, take


def started(layout: Layout, slots: int = 4, layers: int = 1, seed: int = 1) -> ReplayCache:
    """A cache whose slots hold random states."""
    cache = ReplayCache.allocate(layout, layers, slots)
    for layer in range(layers):
        cache.load(layer, range(slots), random_state(layout, slots, generator(seed + layer)))
    return cache


def decode(cache: ReplayCache, name: str, tokens: int, seed: int = 5) -> None:
    """Commit the same random tokens in every slot, one at a time."""
    slots = range(cache.slots)
    rows = Rows.decode(slots)
    inputs = random_inputs(name, cache.layout, tokens, generator(seed))
    for t in range(tokens):
        for layer in range(cache.layers):
            step(cache[layer], take(inputs, [t] * cache.slots), rows)
        cache.commit(rows, [1] * cache.slots)
