"""The gates against formulas that are written out again, in Python's own float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import GdnInputs, KdaInputs, LinearInputs, Mamba2Inputs, ReplayError
from replayssm.inputs import l2_scale, softplus
from replayssm.reference import gates
from support.makers import EVERY, generator, layout_of, random_inputs

NUMBER = st.floats(-60, 60)


def log1p_exp(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(st.lists(NUMBER, min_size=1, max_size=9))
def test_softplus_is_the_logarithm_below_20_and_the_identity_above(values: list[float]) -> None:
    got = softplus(vector(*values))
    torch.testing.assert_close(got, vector(*map(log1p_exp, values)), rtol=1e-14, atol=0)
    assert torch.equal(softplus(vector(20.000001, 800.0)), vector(20.000001, 800.0))
    assert softplus(vector(20.0)).item() > 20.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=8))
def test_l2_scale_has_epsilon_1e_6_inside_the_root(dtype: torch.dtype, values: list[float]) -> None:
    x = vector(*values).to(dtype)
    want = 1 / math.sqrt(sum(float(v) ** 2 for v in x) + 1e-6)
    assert l2_scale(x, torch.float32).dtype == torch.float32
    assert l2_scale(x, torch.float32).item() == pytest.approx(want, rel=1e-5)
    assert l2_scale(x, torch.float64).item() == pytest.approx(want, rel=1e-14)


def test_l2_scale_of_zero_is_1000() -> None:
    assert l2_scale(torch.zeros(4), torch.float64).item() == pytest.approx(1000, rel=1e-14)


@given(dt=NUMBER, bias=st.one_of(st.none(), NUMBER), rate=st.floats(-16, -0.01), low=st.floats(0, 1))
def test_mamba2_gates(dt: float, bias: float | None, rate: float, low: float) -> None:
    layout = layout_of("mamba2", heads=1, groups=1, head_dim=1, state_dim=1)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    shift = None if bias is None else vector(bias)
    inputs = Mamba2Inputs(one * 5, vector(dt)[None], one * 2, one * 3, vector(rate), shift)
    step = log1p_exp(dt + (bias or 0.0))
    for limit, size in ((None, step), ((low, low + 0.5), min(max(step, low), low + 0.5))):
        found = replace(inputs, dt_limit=limit).lower(layout)
        assert (found.q.item(), found.k.item(), found.v.item(), found.key_scale) == (3, 2, 5, None)
        assert found.g is not None
        assert found.beta.item() == pytest.approx(size, rel=1e-13)
        assert found.g.item() == pytest.approx(rate * size, rel=1e-13)


@given(a=NUMBER, b=NUMBER, a_log=st.floats(-5, 3), bias=NUMBER, negative=st.booleans())
def test_gdn_gates(a: float, b: float, a_log: float, bias: float, negative: bool) -> None:
    layout = layout_of("gdn", heads=1, groups=1, head_dim=1, state_dim=2)
    q, k = vector(3, 4)[None, None], vector(0.6, -0.8)[None, None]
    v = vector(7)[None, None]
    inputs = GdnInputs(q, k, v, vector(a)[None], vector(b)[None], vector(a_log), vector(bias), negative)
    found = inputs.lower(layout)
    assert found.g is not None
    assert found.key_scale is not None
    assert found.g.item() == pytest.approx(-math.exp(a_log) * log1p_exp(a + bias), rel=1e-12)
    assert found.beta.item() == pytest.approx(sigmoid(b) * (2 if negative else 1), rel=1e-12)
    assert torch.equal(found.k, k)
    assert found.key_scale.item() == pytest.approx(1 / math.sqrt(1 + 1e-6), rel=1e-12)
    want = q * (2**-0.5 / math.sqrt(25 + 1e-6))
    torch.testing.assert_close(found.q, want, rtol=1e-14, atol=0)


@given(a=st.lists(NUMBER, min_size=2, max_size=2), a_log=st.floats(-5, 3), bias=NUMBER)
@pytest.mark.parametrize("bound", [None, -5.0, -0.5])
def test_kda_gates(bound: float | None, a: list[float], a_log: float, bias: float) -> None:
    layout = layout_of("kda", heads=1, groups=1, head_dim=1, state_dim=2)
    key, v = vector(1, 2)[None, None], vector(7)[None, None]
    bias_2 = vector(bias, bias / 2)[None]
    inputs = KdaInputs(key, key, v, vector(*a)[None, None], vector(0.0)[None], vector(a_log), bias_2, bound)
    found = inputs.lower(layout).g
    assert found is not None
    rate = math.exp(a_log)
    raw = [a[0] + bias, a[1] + bias / 2]
    want = [-rate * log1p_exp(x) if bound is None else bound * sigmoid(rate * x) for x in raw]
    torch.testing.assert_close(found[0, 0], vector(*want), rtol=1e-11, atol=1e-300)
    assert bound is None or (found >= bound).all()


def test_linear_inputs_are_taken_as_they_are() -> None:
    for name in ("gla", "retnet", "deltanet", "linear"):
        layout = layout_of(name)
        inputs = random_inputs(name, layout, 3, generator(0))
        assert isinstance(inputs, LinearInputs)
        found = inputs.lower(layout)
        for key in ("q", "k", "v", "g", "beta"):
            assert getattr(found, key) is None or torch.equal(getattr(found, key), getattr(inputs, key))
        assert (found.key_scale is None) == (layout.recurrence.update == "add")
        assert found.key_scale is None or (found.key_scale == 1).all()
        assert (replace(inputs, beta=None).lower(layout).beta == 1).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gates_are_wide_and_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    layout = layout_of(name, dtype)
    inputs = random_inputs(name, layout, 50, generator(3))
    inputs.check(layout, torch.device("cpu"))
    found = inputs.lower(layout)
    q, k, v, g, beta = gates(inputs, layout)
    used = found.k if found.key_scale is None else found.k.to(layout.wide) * found.key_scale[..., None]
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 1e-6}
    for got, want in ((found.q, q), (used, k), (found.v, v), (found.beta, beta), (found.g, g)):
        if want is None:
            assert got is None
        else:
            assert got is not None
            torch.testing.assert_close(got.double(), want, **close)
    assert {found.q.dtype, found.beta.dtype} == {layout.wide}
    assert {found.k.dtype, found.v.dtype} == {dtype}
    assert found.g is None or (found.g.dtype == layout.wide and bool((found.g <= 0).all()))


@pytest.mark.parametrize("name", EVERY)
def test_tokens_counts_the_tokens(name: str) -> None:
    layout = layout_of(name)
    assert [random_inputs(name, layout, n, generator(0)).tokens for n in (0, 1, 7)] == [0, 1, 7]


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_unit_inputs_equal_the_family_s_own(name: str) -> None:
    """LinearInputs(unit=True) with the family's g and β is the family."""
    layout = layout_of(name)
    inputs = random_inputs(name, layout, 5, generator(3))
    own = inputs.lower(layout)
    raw = LinearInputs(inputs.q, inputs.k, inputs.v, own.g, own.beta, unit=True)
    for a, b in zip(raw.lower(layout), own, strict=True):
        assert torch.equal(a, b)


def test_unit_needs_the_delta_rule() -> None:
    layout = layout_of("retnet")
    inputs = replace(random_inputs("retnet", layout, 2, generator(4)), unit=True)
    with pytest.raises(ReplayError, match=r"^unit: only the delta rule"):
        inputs.check(layout, torch.device("cpu"))
