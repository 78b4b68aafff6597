"""The oracle against closed forms that can be worked out on paper."""

from __future__ import annotations

import math

import pytest
import torch

from replayssm import GDN, LinearInputs, Recurrence
from replayssm.reference import gates, token_loop
from support.makers import EVERY, generator, layout_of, random_inputs, take


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_add_without_decay_is_a_sum_of_outer_products() -> None:
    layout = layout_of("linear", groups=4)
    inputs = random_inputs("linear", layout, 7, generator(0))
    zero = torch.zeros(4, 3, 5, dtype=torch.float64)
    out, states = token_loop(layout, inputs, zero)
    _, k, v, _, beta = gates(inputs, layout)
    outer = torch.einsum("nh,nhp,nhk->nhpk", beta, v, k)
    torch.testing.assert_close(states, outer.cumsum(0))
    assert isinstance(inputs, LinearInputs)
    attention = torch.einsum("ihk,jhk->hij", inputs.q, k).tril() * beta.T[:, None]
    torch.testing.assert_close(out, torch.einsum("hij,jhp->ihp", attention, v))


def test_decay_of_a_half_with_one_number() -> None:
    """S = s/2 + v at each token: 8 -> 5 -> 3.5 -> 2.75."""
    layout = layout_of("retnet", heads=1, groups=1, head_dim=1, state_dim=1)
    one = torch.ones(3, 1, 1, dtype=torch.float64)
    inputs = LinearInputs(one * 2, one, one, vector(*[math.log(0.5)] * 3)[:, None])
    out, states = token_loop(layout, inputs, vector(8.0).view(1, 1, 1))
    torch.testing.assert_close(states.flatten(), vector(5, 3.5, 2.75))
    torch.testing.assert_close(out.flatten(), vector(10, 7, 5.5))


def test_decay_comes_before_the_read_of_the_delta_rule() -> None:
    """S = 4·½ = 2; u = ½ (10 − 2·1) = 4; S = 6."""
    layout = layout_of("gdn", heads=1, groups=1, head_dim=1, state_dim=1)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    inputs = LinearInputs(one, one, one * 10, vector(math.log(0.5))[None], vector(0.5)[None])
    out, states = token_loop(layout, inputs, vector(4.0).view(1, 1, 1))
    assert (out.item(), states.item()) == (pytest.approx(6), pytest.approx(6))


def test_the_delta_rule_stores_and_overwrites_by_key() -> None:
    """With orthonormal keys and β = 1 the state is an associative memory of the last value of each key."""
    layout = layout_of("deltanet", heads=1, groups=1, head_dim=2, state_dim=3)
    keys = torch.eye(3, dtype=torch.float64)[[0, 1, 0, 2]][:, None]
    values = torch.arange(8.0, dtype=torch.float64).view(4, 1, 2)
    out, states = token_loop(layout, LinearInputs(keys, keys, values), torch.zeros(1, 2, 3, dtype=torch.float64))
    torch.testing.assert_close(out, values)
    torch.testing.assert_close(states[-1, 0].T, values[[2, 1, 3], 0])


def test_channels_decay_apart() -> None:
    layout = layout_of("gla", heads=1, groups=1, head_dim=1, state_dim=2)
    g = vector(math.log(0.5), math.log(0.1)).view(1, 1, 2)
    zero = torch.zeros(1, 1, 2, dtype=torch.float64)
    _, states = token_loop(layout, LinearInputs(zero, zero, zero[..., :1], g), vector(8, 30).view(1, 1, 2))
    torch.testing.assert_close(states.flatten(), vector(4, 3))


def test_head_h_uses_group_h_over_the_heads_of_a_group() -> None:
    layout = layout_of("linear", heads=4, groups=2, head_dim=1, state_dim=1)
    k = vector(10, 20).view(1, 2, 1)
    v = vector(1, 2, 3, 4).view(1, 4, 1)
    out, _ = token_loop(layout, LinearInputs(k * 0 + 1, k, v), torch.zeros(4, 1, 1, dtype=torch.float64))
    assert out.flatten().tolist() == [10, 20, 60, 80]


@pytest.mark.parametrize("name", EVERY)
def test_a_tree_is_its_paths(name: str) -> None:
    layout = layout_of(name)
    inputs = random_inputs(name, layout, 5, generator(2))
    state = torch.randn(4, 3, 5, generator=generator(3), dtype=torch.float64)
    parents = [-1, 0, 0, 2, -1]
    out, states = token_loop(layout, inputs, state, parents)
    for line in ([0, 1], [0, 2, 3], [4]):
        want, after = token_loop(layout, take(inputs, line), state)
        assert torch.equal(out[line], want)
        assert torch.equal(states[line], after)


@pytest.mark.parametrize("name", EVERY)
def test_split_in_two_is_the_same(name: str) -> None:
    layout = layout_of(name)
    inputs = random_inputs(name, layout, 6, generator(2))
    state = torch.randn(4, 3, 5, generator=generator(3), dtype=torch.float64)
    whole, states = token_loop(layout, inputs, state)
    first, middle = token_loop(layout, take(inputs, range(2)), state)
    second, last = token_loop(layout, take(inputs, range(2, 6)), middle[-1])
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(last[-1], states[-1], rtol=1e-13, atol=1e-13)


def test_no_tokens_and_dtypes() -> None:
    layout = layout_of("gdn", torch.bfloat16)
    inputs = random_inputs("gdn", layout, 2, generator(0))
    state = torch.zeros(4, 3, 5)
    assert [t.shape for t in token_loop(layout, take(inputs, []), state)] == [(0, 4, 3), (0, 4, 3, 5)]
    assert {t.dtype for t in token_loop(layout, inputs, state)} == {torch.float64}
    assert {t.dtype for t in token_loop(layout, inputs, state, dtype=torch.float32)} == {torch.float32}
    assert Recurrence("gdn", "head", "delta") == GDN
