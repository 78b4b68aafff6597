"""Checks of the device's state formats against ``replayssm.formats``, for the interpreter and for a GPU alike."""

# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm import Layout, Precision, ReplayCache, Rows, precision, step
from replayssm.backends.triton.formats import fold_columns, load_state, store_state
from replayssm.backends.triton.launch import Tile, _capability, fold_shape
from replayssm.formats import BUFFERS, FORMATS, BlockScaled, Plain
from replayssm.rounding import random_bits, seed_bits
from support.makers import generator, layout_of, put, random_inputs, random_state
from support.poison import same

NAMES = [name for name in FORMATS if name != "fp64"]
PRESETS = [
    "float32", "bf16", "fp16", "fp16sr", "bf16sr", "fp8", "fp8sr", "fp8_e5m2sr", "int8", "int8sr", "int4", "int4sr",
    "nvfp4", "nvfp4sr", "float32+bf16", "float32+fp16", "float32+fp8", "float32+fp8_e5m2", "float32+int8",
    "float32+int4", "float32+nvfp4", "fp16sr+nvfp4", "fp16sr+fp8", "nvfp4+int8", "int8+nvfp4",
]  # fmt: skip
HEADS, ROWS = 2, 8


@triton.jit(do_not_specialize=["seed", "layer", "counter"])
def _round_trip(
    x,
    seed,
    layer,
    counter,
    state,
    scale,
    head_scale,
    back,
    WORD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    S: tl.constexpr,
):
    """Store a head, and load it again."""
    head = tl.program_id(0)
    p = tl.arange(0, S.BP)
    rows = head * S.P + p
    C: tl.constexpr = S.C
    numbers = ()
    for part in tl.static_range(C):
        columns = fold_columns(part, S)
        inside = (p < S.P)[:, None] & (columns < S.K)[None, :]
        index = rows[:, None] * S.K + columns[None, :]
        numbers = numbers + (tl.load(x + index, mask=inside, other=0.0),)  # noqa: RUF005
    random = (seed, layer, counter) if STOCHASTIC else None
    held = store_state(state, scale, head_scale, numbers, random, head, rows, p < S.P, WORD, S)
    tl.debug_barrier()
    again = load_state(state, scale, head_scale, head, rows, p < S.P, WORD, S)
    for part in tl.static_range(C):
        columns = fold_columns(part, S)
        inside = (p < S.P)[:, None] & (columns < S.K)[None, :]
        index = rows[:, None] * S.K + columns[None, :]
        tl.store(back + index, held[part], mask=inside)
        tl.store(back + S.H * S.P * S.K + index, again[part], mask=inside)


def states(state_dim: int) -> Iterator[Tensor]:
    """States [H, P, K] with all that a state may hold."""
    source = generator(state_dim)
    normal = torch.randn(HEADS, ROWS, state_dim, generator=source)
    yield normal
    yield normal * torch.exp(6 * torch.randn(normal.shape, generator=source))
    yield torch.zeros_like(normal)
    yield -torch.zeros_like(normal)
    for size in (torch.finfo(torch.float32).max, 1e30, 1e-20, 2.0**-100, 2.0**-104, 1e-38, 1e-45):
        yield (normal.clamp(-3, 3) / 3) * size
    bad = normal.clone()
    bad[0, 1, 2], bad[1, 3, -1], bad[1, 5, 0] = float("nan"), float("inf"), -float("inf")
    yield bad
    holes = normal.clone()
    holes[0, 2, :16], holes[1, :, -16:], holes[0, 3] = 0, 0, 0
    holes[1, 0, 0] = 2.0**22  # blocks whose scale is below the smallest e4m3 number beside one at the top
    yield holes


def ties(name: str, state_dim: int) -> Tensor:
    """A state [H, P, K] of numbers in the middle between two codes, whose scale is 1."""
    source, form = generator(1), FORMATS[name]
    state = torch.randn(HEADS, ROWS, state_dim, generator=source)
    if isinstance(form, Plain):
        half = {"fp16": 0x1000, "bf16": 0x8000}.get(name, 0)
        return (state.view(torch.int32) & ~(2 * half - 1) | half).view(torch.float32)
    block = isinstance(form, BlockScaled)
    if isinstance(form, BlockScaled):
        levels = torch.tensor(sorted(set(form.levels)))
    else:
        codes = torch.arange(128, dtype=torch.uint8).view(form.dtype).float()
        levels = torch.cat([-codes, codes]).unique()
        levels = levels[levels.abs() <= form.top]
    middle = (levels[1:] + levels[:-1]) / 2
    state = middle[torch.randint(len(middle), state.shape, generator=source)]
    state[..., 1:16] = 0
    state[..., 16] = form.top
    for more in range(16):  # the scale's constant is just below 1/top
        state[..., 0] = form.top * (448 if block else 1) * (1 + more * 2.0**-23)
        if (form.encode(state)["_head_scale" if block else "_scale"] == 1).all():
            return state
    raise AssertionError("no such state")


def one_nan(x: Tensor) -> Tensor:
    """The same numbers with one NaN: which of them a conversion makes, processors differ in."""
    return x.masked_fill(x.isnan(), float("nan")) if x.is_floating_point() and x.itemsize > 1 else x


def check_round_trip(name: str, state_dim: int, stochastic: bool, device: str) -> None:
    """Tensors and decoded numbers of a format, to the bit."""
    if stochastic and name == "fp32":
        pytest.skip("float32 is not rounded")
    form = FORMATS[name]
    policy = Precision(name, rounding="stochastic" if stochastic else "nearest")
    layout = layout_of("mamba2", torch.float32, heads=HEADS, head_dim=ROWS, state_dim=state_dim, precision=policy)
    shape = fold_shape(layout, Tile(16, 32, 4), _capability(torch.device(device)))
    for number, state in enumerate([*states(state_dim), ties(name, state_dim)]):
        bits = None
        if stochastic:
            bits = random_bits(3, number, torch.ones(1), state.numel(), state_dim).view(state.shape)
        wanted = form.encode(state, bits)
        got = {
            suffix: torch.zeros((HEADS, *spec[1:]) if spec[1:] else (HEADS,), dtype=dtype, device=device)
            for suffix, (spec, dtype) in form.specs(HEADS, ROWS, state_dim).items()
        }
        raw = [got.get(suffix) for suffix in ("", "_scale", "_head_scale")]
        raw = [t.view(torch.uint8) if t is not None and t.itemsize == 1 else t for t in raw]
        back = torch.zeros((2, *state.shape), device=device)
        key = seed_bits(3), number, 1
        _round_trip[(HEADS,)](state.to(device), *key, *raw, back, WORD=name, STOCHASTIC=stochastic, S=shape)
        for suffix, part in wanted.items():
            assert same(one_nan(got[suffix].cpu()), one_nan(part)), (number, suffix)
        decoded = form.decode(wanted, state_dim, torch.float32)
        for part in back.cpu():
            assert same(torch.nan_to_num(part, 7.0), torch.nan_to_num(decoded, 7.0)), number
            assert same(part.isnan(), decoded.isnan())


def small(name: str, policy: Precision, **sizes: int) -> Layout:
    numbers = {"heads": 2, "groups": 1, "head_dim": 20, "state_dim": 40, "window": 4, "max_draft": 1} | sizes
    return layout_of(name, torch.float32, precision=policy, **numbers)


def check_walk(name: str, policy: Precision, caches: tuple[ReplayCache, ReplayCache], steps: int = 5) -> None:
    """Steps, commits and folds on a device beside the host; what a fold stores, to the bit; and the copy (I6)."""
    device = caches[0]
    layout, source = device.layout, generator(1)
    state = random_state(layout, 3, source)
    for cache in caches:
        cache.load(0, [0, 1, 2], state.to(cache.device), phase=[0, 1, 0])
    draft = layout.max_draft
    for number in range(steps):
        inputs = random_inputs(name, layout, 3 * draft, source, decay=0.05)
        outs = []
        for cache in caches:
            rows = Rows.draft([2, 0, -1], [draft] * 3)
            outs.append(step(cache[0], put(inputs, cache.device), rows).cpu())
            cache.commit(rows, [draft, max(1, draft - 1), 0])
        device.check()
        assert (outs[0] - outs[1]).norm() < 2e-3 * outs[1].norm(), number
    got, want = (cache.materialise(0, [0, 1, 2]).cpu() for cache in caches)
    assert (got - want).norm() < 1e-2 * want.norm()
    slots = []
    while not slots:
        rows = Rows.draft([2, 0], [1, 1])
        step(device[0], put(random_inputs(name, layout, 2, source), device.device), rows)
        device.commit(rows, [1, 1])
        slots = [slot for slot in (0, 2) if int(device.length[slot])]
    before = device.materialise(0, slots)
    device.fold(slots)
    counter = device.folds[slots]
    views = device.views()[0]
    for part, stored in precision.write(before, policy, device.seed, 0, counter).items():
        assert same(views[part][slots], stored), part
    device.fork([2], [1])
    device.import_([0], device.export([2]))
    one, other = device.materialise(0, [0, 1])
    assert torch.equal(one, other)
    device.reset([1])
    assert not device.materialise(0, [1]).any()


def written(buffer: str) -> Precision:
    assert buffer in BUFFERS
    return replace(Precision.preset("float32+fp8"), buffer=buffer)
