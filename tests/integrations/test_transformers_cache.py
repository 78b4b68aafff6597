"""The verbs of a transformers cache, on replayed layers."""

import pytest
import torch
from transformers_tiny import NAMES, ONE_EACH, assert_same, attached, feed, new_cache, prompt, stock, whole

from replayssm import ReplayError
from replayssm.integrations.transformers import attach, detach

HYBRIDS = [*ONE_EACH, "falcon_h1"]


def decoded(name, length=7, steps=4, batch=3, recording=False):
    """An attached model and a cache in the middle of a window, with uncommitted tokens."""
    ids = prompt(batch, 24)
    model = attached(name)
    cache = new_cache(model, recording)
    feed(model, ids[:, :length], cache)
    for t in range(length, length + steps):
        feed(model, ids[:, t : t + 1], cache)
    return model, cache, ids, length + steps


def goes_on(model, cache, ids, done):
    """The cache holds these rows: decode and prefill go on as if it always had."""
    wanted = whole(stock(model.config.model_type if model.config.model_type in NAMES else "qwen3_next"), ids)
    for t in range(done, done + 3):
        assert_same(feed(model, ids[:, t : t + 1], cache)[:, 0], wanted[:, t])
    assert_same(feed(model, ids[:, done + 3 :], cache), wanted[:, done + 3 :])


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 1], [0, 2, 2], [0, 1, 2]])
def test_reorder(name, order, recording):
    """Permutations and copies at once: a row must not be read after it was overwritten."""
    model, cache, ids, done = decoded(name, recording=recording)
    cache.reorder_cache(torch.tensor(order))
    goes_on(model, cache, torch.cat([ids[order, :done], prompt(3, 8, seed=4)], 1), done)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("rows", [[2], [1, 1, 0, 2], [True, False, True]])
def test_batch_select_indices(name, rows):
    model, cache, ids, done = decoded(name)
    cache.batch_select_indices(torch.tensor(rows))
    kept = ids[torch.tensor(rows), :done]
    goes_on(model, cache, torch.cat([kept, prompt(len(kept), 8, seed=4)], 1), done)


@pytest.mark.parametrize("name", HYBRIDS)
def test_batch_repeat_interleave(name):
    model, cache, ids, done = decoded(name)
    cache.batch_repeat_interleave(2)
    goes_on(model, cache, torch.cat([ids[:, :done].repeat_interleave(2, 0), prompt(6, 8, seed=4)], 1), done)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("batch", [3, 2])
def test_reset(name, batch):
    """Nothing of the earlier sequences is left, and the batch may be another one."""
    model, cache, *_ = decoded(name)
    cache.reset()
    if any(getattr(layer, "keys", None) is not None for layer in cache.layers):
        pytest.skip("stock (5.17): reset zeroes the attention's keys and keeps their number")
    ids = prompt(batch, 20, seed=8)
    feed(model, ids[:, :6], cache)
    goes_on(model, cache, ids, 6)


@pytest.mark.parametrize("name", ONE_EACH)
def test_offload_and_prefetch(name):
    """The convolution's part moves as stock moves it; the replayed state stays on its device."""
    model, cache, ids, done = decoded(name)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    goes_on(model, cache, ids, done)


@pytest.mark.parametrize("name", ONE_EACH)
def test_another_batch_raises(name):
    model, cache, ids, done = decoded(name)
    with pytest.raises(ReplayError, match="the cache holds 3 sequences, but the batch has 2"):
        feed(model, ids[:2, done : done + 1], cache)
    goes_on(model, cache, ids, done)


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_state_can_be_read(name):
    """Equal to the one that stock keeps (transposed for the delta rule), at any time."""
    model, cache, ids, done = decoded(name)
    other = new_cache(model)
    feed(stock(name), ids[:, :done], other)
    for replayed, kept in zip(cache.layers, other.layers, strict=True):
        if hasattr(replayed, "state"):
            state = kept.recurrent_states[0]
            assert_same(replayed.state(), state if name == "mamba2" else state.transpose(-1, -2))
    goes_on(model, cache, ids, done)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_cache_that_stock_filled_goes_on(name):
    ids = prompt(2, 20)
    model = stock(name)
    cache = new_cache(model)
    feed(model, ids[:, :9], cache)
    attach(model, window=8)
    goes_on(model, cache, ids, 9)


def test_a_replayed_cache_does_not_go_on_in_a_stock_model():
    model, cache, ids, done = decoded("qwen3_next")
    detach(model)
    with pytest.raises(ReplayError, match="only the attached model can continue it"):
        feed(model, ids[:, done : done + 1], cache)
