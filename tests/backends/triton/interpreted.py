"""The kernels through Triton's interpreter, on the CPU: every mask, against the float64 oracle, with NaN poison.

Run by ``test_interpreter`` in a process of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import support.interpreting  # noqa: F401
from replayssm import Precision, ReplayCache, ReplayError, Rows, precision, step
from replayssm.backends.triton import launch
from replayssm.backends.triton.launch import Tile
from replayssm.backends.triton.tile import halves
from support.makers import generator, layout_of, random_inputs, random_state
from support.model import Model, conv_layout
from support.poison import changed, live_parts

SMALL = {"heads": 2, "groups": 1, "head_dim": 16, "state_dim": 16}


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "gla", "deltanet", "linear", "kda-bounded", "gdn-negative"])
def test_decode(name: str) -> None:
    model = Model(name, layout_of(name, torch.float32, **{**SMALL, "window": 3, "max_draft": 1}), 1, 3)
    model.load([0, 1, 2], phase=[0, 1, 0])
    for number in range(4):
        model.step([2, -1, 0, -1], [1, 1, 1, 0], extra=0)  # the last row's tokens would begin where the inputs end
        if number == 1:
            model.again()
        model.commit([1, 0, 1, 0])
    model.cache.check()
    model.check()


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "gla"])
def test_verify_chains_and_trees_with_a_convolution(name: str) -> None:
    layout = conv_layout(layout_of(name, torch.float32, **{**SMALL, "window": 6, "max_draft": 4}))
    model = Model(name, layout, 1, 3)
    model.load([0, 1, 2])
    model.step([2, -1, 0, -1], [4, 1, 2, 0], extra=0)
    model.commit([3, 0, 2, 0])
    model.step([2, -1, 0], [4, 1, 4], parents=[-1, 0, 0, 2, -1, -1, 0, -1, 1])
    model.commit([2, 0, 3], ends=[2, -1, 3])
    model.check()
    model.step([1, 0, 2], [0, 1, 3])
    model.fold([2])
    model.cache.check()
    model.check()


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_eight_tokens_a_row(name: str) -> None:
    """Queries and keys are columns of a product each."""
    model = Model(name, layout_of(name, torch.float32, **{**SMALL, "window": 12, "max_draft": 7}), 1, 2)
    model.load([0, 1])
    model.step([1, 0], [7, 5])
    model.commit([4, 5])
    model.step([0, 1], [6, 7], parents=[-1, 0, 0, 1, 3, -1, -1, 0, 1, 0, 3, 4, 5])
    model.commit([0, 0], ends=[4, 6])
    model.cache.check()
    model.check()


def test_odd_sizes() -> None:
    """Neither head_dim, state_dim nor window is a power of two; two tiles a head."""
    layout = layout_of("gdn", torch.float32, heads=2, groups=2, head_dim=20, state_dim=24, window=5, max_draft=1)
    model = Model("gdn", layout, 1, 2)
    model.load([0, 1])
    for _ in range(6):
        model.step([1, 0], [1, 1])
        model.commit([1, 1])
    model.check()


def test_stochastic_rounding_takes_the_bits_of_the_counter() -> None:
    policy = Precision(checkpoint=torch.float16, rounding="stochastic")
    layout = layout_of("gdn", torch.float32, **{**SMALL, "window": 4, "max_draft": 1, "precision": policy})
    cache = ReplayCache.allocate(layout, 1, 2, seed=5)
    source = generator(1)
    cache.load(0, [0, 1], random_state(layout, 2, source))
    step(cache[0], random_inputs("gdn", layout, 2, source), Rows.decode([1, 0]))
    cache.commit(Rows.decode([1, 0]), [1, 1])
    wanted = cache.materialise(0, [0, 1])
    cache.fold([0, 1])
    counter = torch.ones(2, dtype=torch.int32)
    rounded = precision.store(wanted, policy, 5, 0, counter)
    assert torch.equal(cache.views()[0]["checkpoint"], rounded)


@pytest.mark.parametrize(
    ("slots", "counts", "taken", "message"),
    [
        ((0, 9, 1), (1, 1, 1), (1, 1, 1), "slot 9"),
        ((0, 1, 0), (1, 1, 1), (1, 1, 1), "comes twice"),
        ((0, 2, 1), (1, 1, 1), (1, 2, 1), "accepts fewer than 0 or more"),
    ],
)
def test_a_wrong_row_writes_nothing(
    slots: tuple[int, ...], counts: tuple[int, ...], taken: tuple[int, ...], message: str
) -> None:
    layout = layout_of("linear", torch.float32, **{**SMALL, "window": 4, "max_draft": 1})
    cache = ReplayCache.allocate(layout, 1, 3)
    rows = Rows.draft(slots, counts)
    step(cache[0], random_inputs("linear", layout, 3, generator(2)), rows)
    cache.commit(rows, list(taken))
    with pytest.raises(ReplayError, match=message):
        cache.check()
    cache.check()
    assert cache.length.tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "deltanet"])
def test_several_blocks_of_entries(name: str) -> None:
    """More than sixteen entries are read and folded, in tiles and pieces of which the last ones are not full.

    A program takes all heads that share a key.
    """
    sizes = {"heads": 2, "groups": 2 if name == "kda" else 1, "head_dim": 20, "state_dim": 40}
    model = Model(name, layout_of(name, torch.float32, **{**sizes, "window": 37, "max_draft": 3}), 1, 2)
    model.cache.verbs.tiles["step"] = Tile(16, 64, 1, programs=1)
    model.load([0, 1], phase=[0, 1])
    for number in range(13):
        model.step([1, 0], [3, 2])
        model.commit([3, 1 + number % 2])
    model.cache.check()
    model.check()
    model.fold([0, 1])
    model.check()


@pytest.mark.parametrize("draft", [1, 3])
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_blocks_may_be_shared_out_as_one_likes(name: str, draft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks begin and end within a head's blocks, and go over several heads that share a key: to the bit the same."""
    sizes = {"heads": 4, "groups": 1, "head_dim": 20, "state_dim": 16, "window": 5, "max_draft": draft}
    found = []
    for each in (1, 4):
        monkeypatch.setattr(launch, "balanced", lambda most, sets, programs, each=each: min(most, each))
        model = Model(name, layout_of(name, torch.float32, **sizes), 1, 2)
        model.cache.verbs.tiles["step"] = Tile(16, 16, 1, heads=2)
        model.load([0, 1])
        outs = []
        for _ in range(2):
            outs += model.step([1, -1], [draft, 1])
            model.commit([draft, 0])
        model.check()
        found.append({"out": torch.cat(outs), **live_parts(model.cache, [1])})
    assert not changed(*found)


@triton.jit
def split_kernel(x, parts, N: tl.constexpr):
    at = tl.arange(0, N)
    high, low = halves(tl.load(x + at))
    tl.store(parts + at, high)
    tl.store(parts + N + at, low)


def test_halves_are_numbers_of_tf32() -> None:
    """Their sum is the number; a tensor core, which takes eleven digits of each, loses one digit of it at most."""
    x = torch.randn(1024, generator=generator(3)) * 2.0 ** torch.randint(-60, 60, (1024,), generator=generator(4))
    parts = torch.empty(2, 1024)
    split_kernel[(1,)](x, parts, 1024)
    high, low = parts
    assert torch.equal(high + low, x)
    kept = [(part.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for part in (high, low)]
    assert torch.equal(kept[0], high.double())
    lost = (kept[0] + kept[1] - x.double()).abs() / x.double().abs()
    assert lost.max() <= 2.0**-23
    assert abs(((kept[0] + kept[1] - x.double()) / x.double()).mean()) < 2.0**-26
