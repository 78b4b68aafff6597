"""Layouts: sizes, dtypes, bytes, and what is no layout."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from replayssm import GDN, KDA, MAMBA2, Conv, Layout, Precision, Recurrence, ReplayError

ACTIVATIONS = "torch.bfloat16, torch.float16, torch.float32, torch.float64"
SIZES: dict[str, Any] = {"heads": 32, "groups": 16, "head_dim": 128, "state_dim": 64}


def test_the_three_families() -> None:
    assert [(r.decay, r.update, r.title) for r in (MAMBA2, GDN, KDA)] == [
        ("head", "add", "Mamba-2"),
        ("head", "delta", "GDN"),
        ("channel", "delta", "KDA"),
    ]
    assert Recurrence("retnet", "head", "add").title == "retnet"


def test_frozen_hashable_and_equal_by_value() -> None:
    left, right = Layout(GDN, **SIZES), Layout(GDN, **SIZES, precision=Precision("fp32"))
    assert left == right
    assert len({left, right, Layout(KDA, **SIZES)}) == 2
    with pytest.raises(FrozenInstanceError):
        left.window = 3  # type: ignore[misc]


def test_names_and_dtypes_of_precision_are_the_same() -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert Precision(name, buffer=name).checkpoint == dtype
        assert Precision(name, buffer=name) == Precision(dtype, buffer=dtype)
    assert Precision(read_copy="bf16").read_copy == torch.bfloat16
    assert Precision() == Precision(torch.float32, None, None, "nearest")


def test_formats_with_scales_keep_their_names() -> None:
    assert Precision("fp8").checkpoint == "fp8"
    assert Precision(torch.float8_e4m3fn, torch.int8) == Precision("fp8", "int8")
    assert Precision(torch.float8_e5m2).checkpoint == "fp8_e5m2"
    assert Precision("int8", "nvfp4", "bf16x2").name == "int8+nvfp4"


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("float32", Precision()),
        ("fp32+bf16", Precision(read_copy="bf16")),
        ("float32+fp8", Precision(read_copy="fp8", buffer="bf16")),
        ("float32+nvfp4", Precision(read_copy="nvfp4", buffer="bf16")),
        ("float32+int4", Precision(read_copy="int4", buffer="bf16")),
        ("fp16sr", Precision("fp16", rounding="stochastic")),
        ("fp16sr+nvfp4", Precision("fp16", "nvfp4", rounding="stochastic", buffer="bf16")),
        ("fp16sr+fp8", Precision("fp16", "fp8", rounding="stochastic", buffer="bf16")),
        ("fp8", Precision("fp8", buffer="bf16")),
        ("fp8_e5m2sr", Precision("fp8_e5m2", rounding="stochastic", buffer="bf16")),
        ("nvfp4", Precision("nvfp4", buffer="bf16")),
        ("int8", Precision("int8", buffer="bf16")),
    ],
)
def test_presets(name: str, policy: Precision) -> None:
    assert Precision.preset(name) == policy
    assert Precision.preset(policy.name) == policy
    Layout(GDN, **SIZES, precision=policy)


@pytest.mark.parametrize(
    "name", ["", "fp7", "float32+", "float32+fp7", "+fp8", "fp32+fp32", "sr", "nvfp4+bf16x2", "auto"]
)
def test_no_preset(name: str) -> None:
    with pytest.raises(ReplayError, match=r"expected a checkpoint .fp64, fp32, bf16, fp16, fp8, .* nvfp4.*such as"):
        Precision.preset(name)


def test_tensors_of_formats_with_scales() -> None:
    layout = Layout(MAMBA2, 4, 2, 8, 40, precision=Precision("int8", "nvfp4", rounding="stochastic"))
    assert layout.state_shape == (4, 8, 40)
    assert {name: (spec.shape, spec.dtype) for name, spec in layout.tensors.items() if not spec.entries} == {
        "checkpoint": ((4, 8, 40), torch.int8),
        "checkpoint_scale": ((4, 8), torch.float32),
        "read_copy": ((4, 8, 32), torch.uint8),  # 40 elements, padded to 64
        "read_copy_scale": ((4, 8, 4), torch.float8_e4m3fn),
        "read_copy_head_scale": ((4,), torch.float32),
    }
    for buffer, extra in (("bf16x2", "written_low"), ("fp16_scaled", "written_scale")):
        tensors = Layout(GDN, **SIZES, precision=Precision(buffer=buffer)).tensors
        assert tensors[extra].entries
        assert tensors["written"].shape == (32, 16, 128)


def test_tensors_of_a_gdn_slot() -> None:
    layout = Layout(GDN, **SIZES, window=16, max_draft=5, precision=Precision(read_copy="bf16"), conv=Conv(10, 4))
    wanted = {
        "checkpoint": ((32, 128, 64), torch.float32),
        "read_copy": ((32, 128, 64), torch.bfloat16),
        "key": ((16, 16, 64), torch.bfloat16),
        "value": ((32, 16, 128), torch.bfloat16),
        "weight": ((32, 16), torch.float32),
        "decay": ((32, 16), torch.float32),
        "key_scale": ((16, 16), torch.float32),
        "written": ((32, 16, 128), torch.float32),
        "conv": ((10, 8), torch.bfloat16),
    }
    assert {name: (spec.shape, spec.dtype) for name, spec in layout.tensors.items()} == wanted
    entries = {name for name, spec in layout.tensors.items() if spec.entries}
    assert entries == {"key", "value", "weight", "decay", "key_scale", "written"}
    state, buffer = 32 * 128 * 64 * 6, 16 * (16 * 64 + 32 * 128) * 2 + 16 * (32 + 32 + 16 + 32 * 128) * 4
    assert layout.slot_bytes == state + buffer + 10 * 8 * 2


@pytest.mark.parametrize(
    ("decay", "update", "shape"), [("head", "add", (32, 16)), ("channel", "delta", (32, 16, 64)), ("none", "add", None)]
)
def test_what_is_buffered(decay: Any, update: Any, shape: tuple[int, ...] | None) -> None:
    tensors = Layout(Recurrence("r", decay, update), **SIZES).tensors
    assert (tensors["decay"].shape if "decay" in tensors else None) == shape
    assert ("written" in tensors, "key_scale" in tensors) == ((update == "delta"),) * 2


def test_dtypes() -> None:
    half = Layout(GDN, **SIZES, dtype=torch.float16, precision=Precision("bf16", buffer="fp16"))
    assert half.wide == torch.float32
    assert half.tensors["checkpoint"].dtype == torch.bfloat16
    assert {half.tensors[n].dtype for n in ("key", "value", "written")} == {torch.float16}
    exact = Layout(GDN, **SIZES, dtype=torch.float64, precision=Precision("fp64"))
    assert exact.wide == torch.float64
    assert {spec.dtype for spec in exact.tensors.values()} == {torch.float64}


def test_room_is_what_a_full_draft_leaves() -> None:
    assert [Layout(GDN, **SIZES, window=w, max_draft=t).room for w, t in ((16, 1), (16, 8), (4, 4))] == [15, 8, 0]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("recurrence: expected MAMBA2, GDN, KDA or a Recurrence, got 'gdn'", {"recurrence": "gdn"}),
        ("heads: expected at least 1, got 0", {"heads": 0}),
        ("groups: expected an integer, got 1.0", {"groups": 1.0}),
        ("head_dim: expected an integer, got True", {"head_dim": True}),
        ("state_dim: expected at least 1, got -3", {"state_dim": -3}),
        ("heads: 32 heads do not divide into groups=5", {"groups": 5}),
        ("window: expected at least 1, got 0", {"window": 0}),
        ("max_draft: 17 drafts do not fit into window=16", {"max_draft": 17}),
        (
            "dtype: got torch.int8, supported: torch.bfloat16, torch.float16, torch.float32, torch.float64",
            {"dtype": torch.int8},
        ),
        ("precision: a float64 checkpoint and dtype=torch.float64 go together", {"dtype": torch.float64}),
        ("precision: a float64 checkpoint and dtype=torch.float64 go together", {"precision": Precision("fp64")}),
    ],
)
def test_no_layout(words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ReplayError) as caught:
        replace(Layout(GDN, **SIZES), **changes)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("start", "make"),
    [
        ("decay: got 'row', supported: 'head', 'channel', 'none'", lambda: Recurrence("x", "row", "add")),  # type: ignore
        ("update: got 'set', supported: 'add', 'delta'", lambda: Recurrence("x", "head", "set")),  # type: ignore
        ("checkpoint: got 'fp31', supported: ", lambda: Precision("fp31")),
        ("read_copy: got torch.int32, supported: None, ", lambda: Precision(read_copy=torch.int32)),
        ("buffer: got torch.int8, supported: None, ", lambda: Precision(buffer=torch.int8)),
        ("rounding: got 'up', supported: 'nearest', 'stochastic'", lambda: Precision(rounding="up")),  # type: ignore
        ("rounding: 'stochastic' needs a ", lambda: Precision(rounding="stochastic")),
        ("width: expected 2…8, got 1", lambda: Conv(3, 1)),
        ("width: expected 2…8, got 9", lambda: Conv(3, 9)),
        ("channels: expected at least 1, got 0", lambda: Conv(0)),
    ],
)
def test_no_recurrence_precision_or_convolution(start: str, make: Any) -> None:
    with pytest.raises(ReplayError) as caught:
        make()
    assert str(caught.value).startswith(start)
