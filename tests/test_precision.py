"""Rounding of checkpoints: nearest, and stochastic from a counter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import Precision, ReplayCache
from replayssm.precision import encode, random_bits, round_stochastic, store
from support.caches import decode, started
from support.makers import generator, layout_of, random_state
from support.poison import same

NARROW = [torch.bfloat16, torch.float16]
narrow = pytest.mark.parametrize("dtype", NARROW)


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The closest values of ``dtype`` at or below and at or above |x|, by looking through all of them."""
    every = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[torch.isfinite(every)].sort().values
    at = torch.searchsorted(every, x.abs(), right=True) - 1
    low = every[at]
    return low, torch.where(low == x.abs(), low, every[(at + 1).clamp(max=len(every) - 1)])


def counter(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@narrow
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.integers(0, 2**32 - 1))
def test_one_of_the_two_neighbours(dtype: torch.dtype, values: list[float], bits: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    got = round_stochastic(x, dtype, torch.full(x.shape, bits, dtype=torch.int64)).float()
    low, high = neighbours(x, dtype)
    assert ((got.abs() == low) | (got.abs() == high)).all()
    assert torch.equal(torch.signbit(got), torch.signbit(x))
    assert torch.isfinite(got).all()


@narrow
def test_bits_decide_by_the_distance(dtype: torch.dtype) -> None:
    """A number a quarter of the way up rounds up for the lowest quarter of the bits."""
    gap = torch.finfo(dtype).eps
    x = torch.full((4,), 1 + gap / 4)
    bits = torch.tensor([0, 2**30 - 2**10, 2**30 + 2**10, 2**32 - 1])
    assert round_stochastic(x, dtype, bits).tolist() == [1 + gap, 1 + gap, 1, 1]
    assert round_stochastic(-x, dtype, bits).tolist() == [-1 - gap, -1 - gap, -1, -1]


@narrow
def test_unbiased(dtype: torch.dtype) -> None:
    """The mean over 4,096 roundings of each of 256 numbers, denormals among them."""
    x = torch.randn(256, generator=generator(0)) * torch.logspace(-9, 4, 256)
    if dtype == torch.bfloat16:
        x[:64] *= 1e-30
    times = 4096
    bits = random_bits(3, 1, torch.arange(times), 256, 64)
    rounded = round_stochastic(x.expand(times, -1), dtype, bits).double()
    low, high = neighbours(x, dtype)
    sigma = (high - low).double().clamp(min=1e-45) / 2 / times**0.5
    assert ((rounded.mean(0) - x.double()).abs() / sigma).max() < 5
    assert ((rounded.mean(0) - x.double()) / sigma).mean().abs() < 5 / 256**0.5


@narrow
def test_exact_values_stay(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for bits in (0, 2**31, 2**32 - 1):
        got = round_stochastic(every.float(), dtype, torch.full(every.shape, bits))
        assert same(got[~every.isnan()], every[~every.isnan()])
        assert got[every.isnan()].isnan().all()


@narrow
def test_saturates_and_keeps_infinities_and_nan(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([top, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, inf, -inf, nan, 0.0, -0.0])
    for bits in (0, 2**32 - 1):
        got = round_stochastic(x, dtype, torch.full(x.shape, bits)).float()
        assert got[:5].tolist() == [top, top, -top, inf, -inf]
        assert got[5].isnan()
        assert torch.signbit(got[6:]).tolist() == [False, True]


@narrow
def test_denormals(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([tiny / 4, -tiny * 2.5, tiny])
    low = torch.full(x.shape, 2**32 - 1)
    assert round_stochastic(x, dtype, low).tolist() == [0, -2 * tiny, tiny]
    assert round_stochastic(x, dtype, torch.zeros(3, dtype=torch.int64)).tolist() == [tiny, -3 * tiny, tiny]


def test_bits_are_uniform_and_differ_by_seed_layer_counter_and_element() -> None:
    """Sixteen bits of them; elements that share a word, 32 columns apart, have other halves of it."""

    def drawn(seed: int, layer: int, *counters: int) -> torch.Tensor:
        return random_bits(seed, layer, counter(*counters), 4096, 128)

    base = drawn(0, 0, 1, 2)
    assert ((base & 0xFFFF) == 0xFF00).all()
    base >>= 16
    assert base.min() >= 0
    assert base.max() < 2**16
    pairs = base.view(2, 32, 2, 2, 32)
    for other in (drawn(1, 0, 1, 2) >> 16, drawn(0, 1, 1, 2) >> 16, base.flip(0), base.roll(1, 1), base.roll(32, 1)):
        assert (base == other).float().mean() < 0.001
    assert abs(torch.corrcoef(pairs.movedim(3, 0).reshape(2, -1).double())[0, 1]) < 5 / 4096**0.5
    assert len(base.unique()) > 7000
    share = torch.stack([(base >> bit & 1).double().mean() for bit in range(16)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / 8192**0.5
    assert same(base[1], drawn(0, 0, 2)[0] >> 16)


def test_bits_round_up_as_often_as_a_16_bit_dtype_can_ask_for() -> None:
    """A share of n/2^16 of the sixteen-bit numbers, for every n, as float32 compares them."""
    bits = torch.arange(2**16) << 16 | 0xFF00
    share = torch.arange(2**16 + 1).float() / 2**16
    drawn = bits.float() / 2.0**32
    assert same(torch.searchsorted(drawn, share), torch.arange(2**16 + 1))


def test_store_rounds_each_row_by_its_own_counter() -> None:
    policy = Precision("bf16", rounding="stochastic")
    state = random_state(layout_of("gdn", torch.float32), 1, generator(0)).expand(3, -1, -1, -1)
    first, second, third = store(state, policy, 7, 0, counter(4, 4, 5))
    assert same(first, second)
    assert not same(first, third)
    assert same(store(state, Precision("fp16"), 7, 0, counter(0, 0, 0)), state.half())
    assert store(state[:0], policy, 7, 0, counter()).dtype == torch.bfloat16


@narrow
def test_runs_are_reproducible_and_independent_of_slot_and_batch(dtype: torch.dtype) -> None:
    layout = layout_of("gdn", torch.float32, precision=Precision(dtype, rounding="stochastic"), window=4, max_draft=1)
    state = random_state(layout, 1, generator(0))

    def run(slots: list[int], seed: int) -> torch.Tensor:
        cache = ReplayCache.allocate(layout, 1, 6, seed=seed)
        cache.load(0, slots, state.expand(len(slots), -1, -1, -1))
        decode(cache, "gdn", 9)
        cache.fold(range(6))
        return cache.views()[0]["checkpoint"][slots]

    base = run([2], 0)
    assert same(base, run([2], 0))
    assert same(base, run([5], 0))
    assert same(base.expand(3, -1, -1, -1), run([0, 4, 1], 0))
    assert not same(base, run([2], 1))


@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16])
def test_encode_makes_the_read_copy(copy: torch.dtype | None) -> None:
    checkpoint = torch.randn(2, 3, 4, 5, generator=generator(0))
    found = encode({"checkpoint": checkpoint}, Precision(read_copy=copy), 5)
    assert list(found) == ([] if copy is None else ["read_copy"])
    assert copy is None or same(found["read_copy"], checkpoint.to(copy))


@pytest.mark.parametrize("checkpoint", ["bf16", "fp16"])
def test_a_narrow_checkpoint_is_rounded_once_a_fold(checkpoint: str) -> None:
    layout = layout_of("gdn", torch.float32, precision=Precision(checkpoint), window=8, max_draft=1)
    cache = started(layout)
    before = cache.views()[0]["checkpoint"].clone()
    decode(cache, "gdn", 7)
    assert same(cache.views()[0]["checkpoint"], before)
    exact = cache.materialise(0, range(4))
    assert exact.dtype == torch.float32
    decode(cache, "gdn", 1, seed=6)
    cache.fork([0], [1])
    assert cache.folds.tolist() == [1, 1, 1, 1]
    assert cache.views()[0]["checkpoint"].dtype == layout.precision.checkpoint


def test_seeds_differ_in_all_64_bits_and_zero_is_no_fixed_point() -> None:
    counter = torch.zeros(1, dtype=torch.int64)
    drawn = [random_bits(seed, 0, counter, 64, 64) for seed in (0, 1, 2**32, 2**32 + 1)]
    for i, a in enumerate(drawn):
        assert int(a[0, 0]) != 0
        assert all(int((a == b).sum()) < 4 for b in drawn[:i])
