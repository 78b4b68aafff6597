"""Which cases are measured: the default run, choices from it, and products."""

import pytest

from replayssm import KDA, ReplayError
from replayssm.bench.cases import SHAPES, Case, Choice, default_cases, make_case, size_of

KDA_SHAPES = {"kda-64x128x128", "kda-32x128x128"}


def names(**lists):
    return [case.name for case in Choice(**lists).cases("cuda")]


def test_the_default_run():
    cases = default_cases("cuda")
    plain = {Case(s, b, 16 if s in KDA_SHAPES else 32) for s in SHAPES for b in (512, 256, 64, 16, 1)}
    # Windows of steps with four and with eight drafts.
    windows = {s: (16, 16) if "kda" in s else (32, 48) if "mamba2" in s else (32, 32) for s in SHAPES}
    verify = {
        Case(s, b, windows[s][i], *tn) for s in SHAPES for b in (256, 64) for i, tn in enumerate(((4, 3), (8, 5)))
    }
    policies = ("fp16sr", "fp32+fp8", "fp32+nvfp4", "fp16sr+nvfp4", "fp32+int8")
    low = {Case(s, 256, 16 if s in KDA_SHAPES else 32, precision=policy) for s in SHAPES for policy in policies}
    low |= {Case(s, 256, windows[s][1], 8, 5, precision="fp32+fp8") for s in SHAPES}
    assert len(SHAPES) == 5
    assert set(cases) == plain | verify | low
    assert len(cases) == len(set(cases)) == 75


def test_choices_take_from_the_default_run():
    assert names() == [case.name for case in default_cases("cuda")]
    assert names(shapes=["kda-32"], drafts=[8]) == [
        f"kda-32x128x128/b{end}" for end in ("256/t5of8/w16/fp32", "64/t5of8/w16/fp32", "256/t5of8/w16/fp32+fp8")
    ]
    assert names(recurrences=["gdn"], parts=["nvfp4"]) == [
        f"gdn-64x128x128/b256/t1/w32/{policy}" for policy in ("fp32+nvfp4", "fp16sr+nvfp4")
    ]
    assert {name.split("/")[1] for name in names(batches=[1, 16])} == {"b1", "b16"}


def test_a_value_that_is_in_none_of_them_makes_a_product():
    assert names(shapes=["gdn-64"], batches=[64, 128]) == [f"gdn-64x128x128/b{b}/t1/w32/fp32" for b in (64, 128)]
    assert names(shapes=["gdn-8x64x32g4"]) == ["gdn-8x64x32g4/b256/t1/w32/fp32"]
    assert names(shapes=["kda-64"], drafts=[2, 4], precisions=["bf16"]) == [
        "kda-64x128x128/b256/t1of2/w16/bf16",
        "kda-64x128x128/b256/t3of4/w16/bf16",
    ]
    assert len(names(windows=[24], recurrences=["mamba2"])) == 2


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"recurrences": ["rwkv"]}, "recurrence: got 'rwkv', supported: mamba2, gdn, kda"),
        ({"shapes": ["gdn-8x64"]}, "shape: got 'gdn-8x64', expected one of mamba2-128x64x128"),
        ({"precisions": ["fp3"]}, "fp3"),
        ({"parts": ["b257"]}, "no case is left"),
        ({"batches": [3], "parts": ["b256"]}, "no case is left"),
    ],
)
def test_wrong_choices(lists, message):
    with pytest.raises(ReplayError, match=message):
        Choice(**lists).cases("cuda")


def test_a_case():
    case = make_case("kda-4x16x32g4", 3, 8)
    assert (case.window, case.accepted, case.period) == (16, 5, (16 - 8) // 5 + 1)
    assert case.layout.recurrence == KDA == size_of(case.shape).recurrence
    assert (case.layout.heads, case.layout.head_dim, case.layout.state_dim, case.layout.groups) == (4, 16, 32, 4)
    with pytest.raises(ReplayError, match="accepted: got 5, expected 1…4"):
        make_case("gdn-64x128x128", 3, 4, accepted=5)
    with pytest.raises(ReplayError, match="window"):
        make_case("gdn-64x128x128", 3, 8, window=4)
