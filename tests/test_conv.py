"""The short convolution: decode and verify against torch's own convolution and tap by tap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayssm import Conv, Layout, ReplayCache, Rows, conv_step, step
from replayssm.reference import causal_conv
from support.makers import generator, layout_of, random_inputs
from support.poison import changed, picture, poison, same

CHANNELS = 3
widths = pytest.mark.parametrize("width", range(2, 9))


def layout_with(width: int, dtype: torch.dtype = torch.float64, max_draft: int = 4) -> Layout:
    return layout_of("gdn", dtype, conv=Conv(CHANNELS, width), max_draft=max_draft)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def finish(cache: ReplayCache, rows: Rows, accepted: list[int], path: list[list[int]] | None = None) -> None:
    """Step the recurrence with the same rows, then commit."""
    tokens = int(rows.offsets[-1])
    step(cache[0], random_inputs("gdn", cache.layout, tokens, generator(0)), rows)
    cache.commit(rows, accepted, path=path)


def by_torch(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """One sequence [N, C] through ``conv1d``."""
    whole = torch.cat([tail, x.T], 1)[None].double()
    out = F.conv1d(whole, weight[:, None].double(), None if bias is None else bias.double(), groups=len(weight))
    return (F.silu(out) if activation == "silu" else out)[0].T


@widths
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
@given(counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
@settings(max_examples=6)
def test_drafts_and_rollback(width: int, biased: bool, activation: str | None, counts: list[tuple[int, int]]) -> None:
    """Ragged drafts, partly accepted: the accepted inputs alone, convolved by torch, give the same outputs."""
    cache = ReplayCache.allocate(layout_with(width), 1, 2)
    weight, bias = numbers(CHANNELS, width), numbers(CHANNELS, seed=1) if biased else None
    tail = numbers(2, CHANNELS, width - 1, seed=2)
    cache.load_conv(0, [0, 1], tail)
    seen = [tail[0], tail[1]]
    for turn, (drafted, wanted) in enumerate(counts):
        poison(cache)
        rows = Rows.draft([1, -1, 0], [drafted, 1, 2])
        x = numbers(drafted + 4, CHANNELS, seed=turn)
        x[[drafted, drafted + 3]] = float("nan")
        out = conv_step(cache[0], x, weight, bias, rows, activation)
        assert not out[[drafted, drafted + 3]].any()
        taken = min(drafted, wanted)
        for slot, mine, kept in ((1, slice(0, drafted), taken), (0, slice(drafted + 1, drafted + 3), turn % 3)):
            if x[mine].shape[0]:
                want = by_torch(x[mine], seen[slot][:, 1 - width :], weight, bias, activation)
                torch.testing.assert_close(out[mine], want, rtol=1e-12, atol=1e-12)
            seen[slot] = torch.cat([seen[slot], x[mine][:kept].T], 1)
        finish(cache, rows, [taken, 0, turn % 3])
        want_tail = torch.stack([line[:, 1 - width :] for line in seen])
        assert torch.equal(cache.conv_tail(0, [0, 1]), want_tail)


@widths
def test_trees(width: int) -> None:
    """A token's earlier inputs are its ancestors; the accepted path becomes the tail."""
    cache = ReplayCache.allocate(layout_with(width), 1, 3)
    weight, bias = numbers(CHANNELS, width), numbers(CHANNELS, seed=1)
    tail = numbers(3, CHANNELS, width - 1, seed=2)
    cache.load_conv(0, range(3), tail)
    truth = list(tail)
    trees = [([-1, 0, 0, 2], [0, 2, 3]), ([-1, -1, 1, 1], [1, 3]), ([-1, 0, 1, 2], [0, 1, 2, 3]), ([-1, 0, -1, 2], [2])]
    for turn in range(8):
        (left, kept), (right, _) = trees[turn % 4], trees[(turn + 1) % 4]
        x = numbers(8, CHANNELS, seed=turn)
        poison(cache)
        rows = Rows.draft([2, 0], [4, 4], left + right)
        out = conv_step(cache[0], x, weight, bias, rows)
        for start, slot, parents in ((0, 2, left), (4, 0, right)):
            for token in range(4):
                line, at = [], token
                while at >= 0:
                    line.insert(0, start + at)
                    at = parents[at]
                want = by_torch(x[line], truth[slot], weight, bias, "silu")[-1]
                torch.testing.assert_close(out[start + token], want, rtol=1e-12, atol=1e-12)
        finish(cache, rows, [len(kept), 0], [kept + [-1] * (4 - len(kept)), [-1] * 4])
        truth[2] = torch.cat([truth[2], x[kept].T], 1)[:, 1 - width :]
        assert torch.equal(cache.conv_tail(0, range(3)), torch.stack(truth))


@widths
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_oracle_is_torchs_convolution(width: int, activation: str | None) -> None:
    x, tail = numbers(9, CHANNELS), numbers(CHANNELS, width - 1, seed=1)
    weight, bias = numbers(CHANNELS, width, seed=2), numbers(CHANNELS, seed=3)
    for shift in (bias, None):
        want = by_torch(x, tail, weight, shift, activation)
        torch.testing.assert_close(causal_conv(x, tail, weight, shift, activation), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("weights", ["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_activations_are_summed_in_float32(dtype: torch.dtype, weights: str) -> None:
    cache = ReplayCache.allocate(layout_with(4, dtype), 1, 1)
    weight = numbers(CHANNELS, 4, dtype=torch.float32 if weights == "float32" else dtype)
    bias, tail = numbers(CHANNELS, seed=1, dtype=weight.dtype), numbers(1, CHANNELS, 3, seed=2, dtype=dtype)
    cache.load_conv(0, [0], tail)
    x = numbers(4, CHANNELS, seed=3, dtype=dtype)
    out = conv_step(cache[0], x, weight, bias, Rows.draft([0], [4]))
    assert out.dtype == dtype
    want = by_torch(x, tail[0], weight, bias, "silu")
    half_step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=half_step, atol=half_step)


def test_a_step_is_idempotent_and_writes_past_the_tail_only() -> None:
    cache = ReplayCache.allocate(layout_with(4), 2, 3)
    cache.load_conv(1, [2, 0], numbers(2, CHANNELS, 3))
    x, weight = numbers(5, CHANNELS), numbers(CHANNELS, 4)
    rows = Rows.draft([2, 0], [4, 1])
    tails = [cache.conv_tail(n, range(3)) for n in range(2)]
    before = picture(cache)
    first = conv_step(cache[1], x, weight, None, rows)
    once = picture(cache)
    assert set(changed(before, once)) == {"1.conv", "_drafts"}
    assert same(conv_step(cache[1], x, weight, None, rows), first)
    assert changed(once, picture(cache)) == []
    assert all(same(tails[n], cache.conv_tail(n, range(3))) for n in range(2))


def test_padding_slots_of_load_and_tail() -> None:
    cache = ReplayCache.allocate(layout_with(3), 1, 2)
    tail = numbers(3, CHANNELS, 2)
    cache.load_conv(0, [-1, 1, 0], tail)
    assert torch.equal(cache.conv_tail(0, [1, -1, 0]), torch.stack([tail[1], tail[0] * 0, tail[2]]))


def test_reset_gives_a_zero_tail() -> None:
    cache = ReplayCache.allocate(layout_with(4), 1, 2)
    cache.load_conv(0, [0, 1], numbers(2, CHANNELS, 3))
    cache.reset([0])
    assert not cache.conv_tail(0, [0]).any()
    assert cache.conv_tail(0, [1]).all()
    x, weight = numbers(2, CHANNELS), numbers(CHANNELS, 4)
    out = conv_step(cache[0], x, weight, None, Rows.draft([0], [2]), None)
    torch.testing.assert_close(out[0], x[0] * weight[:, -1])
    torch.testing.assert_close(out[1], x[1] * weight[:, -1] + x[0] * weight[:, -2])
