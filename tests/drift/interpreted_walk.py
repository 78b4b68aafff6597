"""The kernel that walks tokens, through Triton's interpreter, against the same loop in torch and the library's formats.

Run by ``test_drift_kernel`` in a process of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import pytest
import torch

import support.interpreting  # noqa: F401
from replayssm import Precision
from replayssm.drift.kernel import GRIDS, walk
from replayssm.drift.loop import Loop, Tokens, walk_torch
from support.makers import CORNERS, generator, layout_of, random_inputs

FORMATS = [name + rounding for name in GRIDS for rounding in ("", "sr")]


def loops(name: str, preset: str, wide: torch.dtype = torch.float32, **sizes: int) -> tuple[Loop, Loop, Tokens]:
    """Two loops that start from the same random states, and 6 tokens for them."""
    layout = layout_of(name, torch.float32, **{"heads": 2, "groups": 1, "head_dim": 16, "state_dim": 32, **sizes})
    source = generator(3)
    low = random_inputs(name, layout, 12, source).lower(layout)
    k = low.k if low.key_scale is None else low.k * low.key_scale[..., None]
    parts = (None if t is None else t.to(wide).unflatten(0, (2, 6)) for t in (low.q, k, low.v, low.g, low.beta))
    made = [Loop(layout, 2, Precision.preset(preset), torch.device("cpu"), 5, wide) for _ in range(2)]
    made[0].state[:] = torch.randn(made[0].state.shape, generator=source)
    made[1].state[:] = made[0].state
    return *made, Tokens(*parts)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CORNERS)
def test_recurrences(name: str, wide: torch.dtype) -> None:
    one, other, tokens = loops(name, "float32", wide, head_dim=12, state_dim=20)
    bound = {"rtol": 1e-4, "atol": 1e-5} if wide == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(walk(one, tokens), walk_torch(other, tokens), **bound)
    torch.testing.assert_close(one.state, other.state, **bound)
    assert one.count == other.count == 6


@pytest.mark.parametrize("preset", FORMATS)
def test_formats_to_the_bit(preset: str) -> None:
    """Tokens that write nothing and forget nothing: what is left is rounding, six times over."""
    one, other, tokens = loops("gdn", preset)
    one.state[0, 0, :3] = other.state[0, 0, :3] = torch.tensor([0.0, 1e-30, 1e3])[:, None] * one.state[0, 0, :3]
    still = tokens._replace(g=tokens.g * 0, beta=tokens.beta * 0)
    before = one.state.clone()
    walk(one, still)
    walk_torch(other, still)
    assert torch.equal(one.state, other.state)
    assert not torch.equal(one.state, before)


def test_a_format_within_a_recurrence() -> None:
    one, other, tokens = loops("kda", "nvfp4", state_dim=24)
    got, wanted = walk(one, tokens), walk_torch(other, tokens)
    assert (got - wanted).norm() < 0.02 * wanted.norm()  # a sum's last bit may move an element to the next code
