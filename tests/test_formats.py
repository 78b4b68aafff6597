"""Formats against a definition that looks through all codes, and what is defined at the edges."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from replayssm.formats import BLOCK, BUFFERS, FORMATS, SMALLEST, Parts, padded
from replayssm.rounding import random_bits
from support.makers import generator
from support.poison import same

NAN, INF = float("nan"), float("inf")
ROWS, BLOCKS = ["fp8", "fp8_e5m2", "int8"], ["int4", "nvfp4"]
SCALED = [*ROWS, *BLOCKS]
scaled = pytest.mark.parametrize("name", SCALED)
# Relative error (root mean square) of normal numbers, and the bytes of an element at state_dim 128.
ERRORS = {"bf16": 0.0018, "fp16": 0.00025, "fp8": 0.027, "fp8_e5m2": 0.053, "int8": 0.0075, "int4": 0.10, "nvfp4": 0.10}
BYTES = {"bf16": 2, "fp16": 2, **dict.fromkeys(ROWS, 1 + 4 / 128), **dict.fromkeys(BLOCKS, 0.5 + 1 / 16 + 4 / 128 / 64)}


def minifloat(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """The values of the codes without a sign, by the definition of IEEE-like numbers."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            found.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return found


# Levels of the codes 0, 1, 2, … without sign: e4m3 has no infinity and one NaN, e5m2 has both, e2m1 neither.
E4M3 = minifloat(4, 3)[:-1]
MAGNITUDES = {
    "fp8": E4M3,
    "fp8_e5m2": minifloat(5, 2)[:-4],
    "int8": [float(n) for n in range(128)],
    "int4": [float(n) for n in range(8)],
    "nvfp4": minifloat(2, 1),
}


def nearest(x: float, levels: list[float]) -> int:
    """The code closest to x ≥ 0, of two equally close ones the even one, by looking through all of them."""
    return min(range(len(levels)), key=lambda code: (abs(levels[code] - x), code % 2))


def value(name: str, parts: Parts, h: int, p: int, k: int) -> float:
    """Element (h, p, k) read from the bytes by the definition."""
    levels, row = MAGNITUDES[name], parts[""][h, p].view(torch.uint8)
    if name in BLOCKS:
        half = len(row)
        code = int(row[k % half]) >> (4 if k >= half else 0) & 15
        size, negative = (code & 7, code & 8) if name == "nvfp4" else (min(code, 16 - code), code & 8)
        block = int(parts["_scale"].view(torch.uint8)[h, p, k // BLOCK])
        assert block < 0x7F
        scale = E4M3[block] * float(parts["_head_scale"][h])
    else:
        code = int(row[k])
        size, negative = (code & 127, code & 128) if name != "int8" else (min(code, 256 - code), code & 128)
        scale = float(parts["_scale"][h, p])
    level = float(size) if name.startswith("int") else levels[size]
    return (-1 if negative else 1) * level * scale


def test_levels_of_e2m1_and_e4m3() -> None:
    assert MAGNITUDES["nvfp4"] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(127, dtype=torch.uint8)
    assert codes.view(torch.float8_e4m3fn).tolist() == E4M3
    assert (E4M3[-1], MAGNITUDES["fp8_e5m2"][-1]) == (448, 57344)


@scaled
@pytest.mark.parametrize("state_dim", [32, 64, 5, 48])
def test_decode_reads_the_bytes_as_defined(name: str, state_dim: int) -> None:
    """Every code, by random bytes."""
    form, source = FORMATS[name], generator(state_dim)
    parts: Parts = {}
    for suffix, (shape, dtype) in form.specs(2, 3, state_dim).items():
        if dtype == torch.float32:
            parts[suffix] = torch.rand(shape, generator=source) + 0.1
        else:
            top = 0x7F if suffix else 256  # block scales are never negative
            raw = torch.randint(0, top, shape, generator=source, dtype=torch.uint8)
            if name.startswith("fp8"):  # codes of NaN and infinity are never written
                raw = raw & 0x80 | (raw & 0x7F).clamp(max=len(MAGNITUDES[name]) - 1)
            parts[suffix] = raw if dtype == torch.uint8 else raw.view(dtype)
    got = form.decode(parts, state_dim, torch.float64)
    assert got.shape == (2, 3, state_dim)
    for h, p, k in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(state_dim)).tolist():
        assert got[h, p, k] == pytest.approx(value(name, parts, h, p, k), rel=1e-12)


@scaled
@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_encode_takes_the_nearest_code(name: str, spread: float) -> None:
    source = generator(7)
    state = torch.randn(2, 3, 64, generator=source) * torch.exp(spread * torch.randn(2, 3, 64, generator=source))
    form = FORMATS[name]
    parts, levels = form.encode(state), MAGNITUDES[name]
    got = form.decode(parts, 64, torch.float32)
    for h, p, k in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(0, 64, 3)).tolist():
        scale = parts["_scale"].double()[h, p]
        if name in BLOCKS:
            scale = scale[k // BLOCK] * parts["_head_scale"].double()[h]
        x = abs(float(state[h, p, k])) / float(scale) if scale > 0 else 0.0
        took = abs(float(got[h, p, k])) / float(scale) if scale > 0 else 0.0
        assert abs(took - x) <= abs(levels[nearest(x, levels)] - x) + 1e-6 * levels[-1]
        assert got[h, p, k] == 0 or (got[h, p, k] > 0) == (state[h, p, k] > 0)


def unit_row(name: str) -> torch.Tensor:
    """A row [1, 1, 64] whose scale at elements 16…31 is exactly 1 as long as the largest of them is the top level."""
    row, top = torch.zeros(1, 1, 64), MAGNITUDES[name][-1]
    row[..., 16] = top
    for step in range(16):
        row[..., 0] = top * (448 if name in BLOCKS else 1) * (1 + step * 2.0**-23)
        parts = FORMATS[name].encode(row)
        if parts["_head_scale" if name in BLOCKS else "_scale"].item() == 1:
            return row
    raise AssertionError("no such row")


@scaled
def test_every_level_survives_and_ties_go_to_even_codes(name: str) -> None:
    """A row of all levels is stored exactly (to float32); the middle between two goes to the even code."""
    levels, row, form = MAGNITUDES[name], unit_row(name), FORMATS[name]
    for code, (low, high) in enumerate(pairwise(levels)):
        row[..., 17:20] = torch.tensor([low, -high, (low + high) / 2])
        got = form.decode(form.encode(row), 64, torch.float32)[0, 0]
        assert got[16:20].tolist() == [levels[-1], low, -high, high if code % 2 else low]
        assert not got[20:].any()


@pytest.mark.parametrize("name", ERRORS)
def test_error_and_bytes(name: str) -> None:
    state = torch.randn(2, 4, 64, 128, generator=generator(3))
    form = FORMATS[name]
    parts = form.encode(state)
    got = form.decode(parts, 128, torch.float32)
    assert (got - state).norm() / state.norm() < ERRORS[name]
    assert sum(part.nbytes for part in parts.values()) / state.numel() == pytest.approx(BYTES[name])
    specs = form.specs(4, 64, 128)
    assert {suffix: ((2, *shape), dtype) for suffix, (shape, dtype) in specs.items()} == {
        suffix: (tuple(part.shape), part.dtype) for suffix, part in parts.items()
    }


@scaled
def test_zeros_are_zero_bytes(name: str) -> None:
    for zero in (0.0, -0.0):
        state = torch.full((2, 3, 40), zero)
        for bits in (None, torch.zeros(state.shape, dtype=torch.int64)):
            assert not any(part.view(torch.uint8).any() for part in FORMATS[name].encode(state, bits).values())
    mixed = torch.zeros(2, 2, 64)
    mixed[0, 1, 20] = 3  # an all-zero head, row and block beside others
    assert same(FORMATS[name].decode(FORMATS[name].encode(mixed), 64, torch.float32) > 2, mixed > 2)


@scaled
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_makes_its_row_or_block_nan(name: str, bad: float) -> None:
    state = torch.randn(2, 3, 64, generator=generator(0))
    clean = FORMATS[name].decode(FORMATS[name].encode(state), 64, torch.float32)
    state[1, 2, 18] = bad
    got = FORMATS[name].decode(FORMATS[name].encode(state), 64, torch.float32)
    touched = torch.zeros_like(state, dtype=torch.bool)
    touched[1, 2, slice(16, 32) if name in BLOCKS else slice(None)] = True
    assert got[touched].isnan().all()
    assert torch.equal(got[~touched], clean[~touched])


@scaled
@pytest.mark.parametrize("size", [torch.finfo(torch.float32).max, 1e30, 1.0, 1e-20])
def test_huge_and_small_states_keep_their_digits(name: str, size: float) -> None:
    state = torch.randn(2, 4, 64, generator=generator(1)).clamp(-3, 3) / 3
    state[:, :, 0] = 1
    got = FORMATS[name].decode(FORMATS[name].encode(state * size), 64, torch.float32)
    assert got.isfinite().all()
    assert (got.double() - (state * size).double()).norm() < 0.13 * (state * size).double().norm()


@scaled
def test_below_the_smallest_scale_digits_go_and_then_all_is_zero(name: str) -> None:
    for size in (SMALLEST, SMALLEST / 8, 1e-38, 1e-45):
        state = torch.full((1, 1, 32), size)
        parts = FORMATS[name].encode(state)
        got = FORMATS[name].decode(parts, 32, torch.float32)
        assert (got >= 0).all()
        assert (got <= 2 * max(size, 1e-45)).all()
    assert not got.any()


@pytest.mark.parametrize("name", BLOCKS)
def test_block_scales_stay_within_e4m3(name: str) -> None:
    """The largest block of a head gets 448, and blocks 2^19 times smaller are zero."""
    state = torch.ones(1, 1, 64)
    state[..., 16:32] = 2.0**-14
    state[..., 32:48] = 2.0**-20
    parts = FORMATS[name].encode(state * 1e30)
    assert parts["_scale"].float()[0, 0].tolist() == [448, 448 * 2.0**-14, 0, 448]
    up = FORMATS[name].encode(state, torch.zeros(state.shape, dtype=torch.int64))
    assert up["_scale"].float()[0, 0].tolist() == [448, 480 * 2.0**-14, 2.0**-9, 448]


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_padded_to_32(name: str) -> None:
    state = torch.randn(1, 2, 5, generator=generator(2))
    parts = FORMATS[name].encode(state)
    wide = FORMATS[name].encode(torch.nn.functional.pad(state, (0, 27)))
    assert (padded(5), padded(32), padded(33)) == (32, 32, 64)
    assert all(same(parts[suffix], wide[suffix]) for suffix in wide)


@scaled
def test_stochastic_is_unbiased_and_takes_neighbours(name: str) -> None:
    form, times = FORMATS[name], 2048
    state = torch.randn(1, 2, 32, generator=generator(4))
    bits = random_bits(1, 2, torch.arange(times), state.numel(), 32).view(times, *state.shape[1:])
    parts = form.encode(state.expand(times, -1, -1)[:, None], bits[:, None])
    got = form.decode(parts, 32, torch.float64)[:, 0]
    low, high = got.amin(0), got.amax(0)
    for suffix, part in parts.items():
        if suffix:
            assert same(part[:1].expand_as(part).contiguous(), part)
    sigma = (high - low) / 2 / times**0.5 + 2e-4 * state[0].abs() * (low == high)  # a neighbour may never be met
    assert ((got.mean(0) - state[0].double()).abs() / sigma).max() < 5.5
    assert ((got - low).abs().minimum((got - high).abs()) == 0).all()


@pytest.mark.parametrize(("name", "limit"), [("bf16", 4e-3), ("bf16x2", 8e-6), ("fp16_scaled", 5e-4)])
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e8])
def test_formats_of_written_values(name: str, limit: float, size: float) -> None:
    form = BUFFERS[name]
    u = torch.randn(3, 2, 8, 16, generator=generator(5)) * size
    parts = form.encode(u)
    got = form.decode(parts, 16, torch.float32)
    assert ((got - u).abs() / u.abs().amax(-1, keepdim=True)).max() < limit
    assert not form.decode(form.encode(torch.zeros(1, 1, 2, 3)), 3, torch.float32).any()
    u[0, 0, 0, 3] = NAN
    assert form.decode(form.encode(u), 16, torch.float32).isnan().sum() == 1
    if name == "fp16_scaled":
        assert (torch.frexp(parts["_scale"]).mantissa == 0.5).all()
