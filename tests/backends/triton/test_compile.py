"""The kernels compile for GPUs that are not there, within a budget of registers, spills and shared memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from compiled import ARCH, TARGETS, arithmetic, compile_for, fold_source, resources, step_source

from replayssm import GDN, KDA, MAMBA2, Layout, Precision
from replayssm.backends.triton.launch import choose_tile

LAYOUTS = {
    "mamba2": (Layout(MAMBA2, 128, 8, 64, 128, window=32), "mamba2", False),
    "gdn": (Layout(GDN, 64, 16, 128, 128, window=32), "softplus", True),
    "kda": (Layout(KDA, 64, 64, 128, 128, window=16), "softplus", True),
}
DRAFT = {"decode": 1, "fold": 1, "verify": 4}
SPILLED = 64
# Bytes that a program may have on each target.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "kernel", ["decode/mamba2", "decode/kda", "verify/mamba2", "verify/gdn", "fold/gdn", "fold/mamba2"]
)
def test_compiles_within_budget(kernel: str, target: str) -> None:
    kind, name = kernel.split("/")
    layout, gate, unit = LAYOUTS[name]
    layout = replace(layout, max_draft=DRAFT[kind])
    tile = choose_tile("fold" if kind == "fold" else "step", layout, torch.device("cpu"))
    if kind == "fold":
        compiled = compile_for(fold_source(layout, tile, "bf16", ARCH[target]), target, tile.warps)
    else:
        compiled = compile_for(step_source(layout, tile, gate, unit, False, "bf16", ARCH[target]), target, tile.warps)
    assert compiled.metadata.shared <= SHARED[target]
    if target.startswith("sm"):
        used = resources(compiled, target)
        assert used.registers <= 255
        assert used.spilled <= SPILLED


def test_the_state_goes_to_tensor_cores_straight() -> None:
    """Four pieces of the state more: their words of sixteen bytes a thread, and nothing that moves between threads."""
    found = []
    for state_dim in (64, 128):
        layout = Layout(MAMBA2, 128, 8, 64, state_dim, window=32, max_draft=4)
        tile = choose_tile("step", layout, torch.device("cpu"))
        compiled = compile_for(step_source(layout, tile, "mamba2", False, False, "bf16", 90), "sm_90", tile.warps)
        found.append([compiled.asm["ptx"].count(word) for word in ("ld.shared", "st.shared", "ldmatrix")])
    each = tile.p * 16 // 32 // 4
    assert [few + more for few, more in zip(found[0], (4 * each, 0, 0), strict=True)] == found[1]


FAMILIES = {"mamba2": (MAMBA2, 128, 8, 64, 128), "gdn": (GDN, 64, 16, 128, 128), "kda": (KDA, 64, 64, 128, 128)}
# Bytes that may be spilled: by the end of a fold, which encodes, never by what runs once an entry.
ENCODING = 320
FORMATS = [
    ("decode/gdn", "float32+fp8", "sm_90"),
    ("decode/mamba2", "float32+nvfp4", "sm_90"),
    ("decode/kda", "int8", "sm_90"),
    ("decode/gdn", "float32+int4", "sm_90"),
    ("decode/gdn", "fp8_e5m2", "sm_90"),
    ("verify/gdn", "float32+fp8", "sm_90"),
    ("verify/gdn", "float32+nvfp4", "sm_90"),
    ("fold/gdn", "float32+nvfp4", "sm_90"),
    ("fold/mamba2", "fp16sr+nvfp4", "sm_90"),
    ("fold/kda", "fp16sr+fp8", "sm_90"),
    ("fold/gdn", "nvfp4sr", "sm_90"),
    ("decode/gdn", "float32+fp8", "sm_80"),
    ("decode/gdn", "float32+nvfp4", "sm_80"),
    ("fold/gdn", "float32+nvfp4", "sm_80"),
    ("decode/gdn", "float32+nvfp4", "sm_100"),
    ("fold/gdn", "float32+nvfp4", "sm_100"),
    ("decode/gdn", "float32+fp8", "gfx942"),
    ("decode/gdn", "float32+nvfp4", "gfx942"),
    ("fold/gdn", "float32+nvfp4", "gfx942"),
]
# Instructions that convert where the GPU has them, and nowhere else.
CONVERSIONS = {"fp8": ("cvt.rn.f16x2.e4m3x2", ("sm_90", "sm_100")), "nvfp4": ("cvt.rn.f16x2.e2m1x2", ("sm_100",))}


@pytest.mark.parametrize(("kernel", "preset", "target"), FORMATS)
def test_formats_compile_within_budget(kernel: str, preset: str, target: str) -> None:
    """With the tile that the heuristic chooses."""
    kind, name = kernel.split("/")
    draft = 4 if kind == "verify" else 1
    layout = Layout(*FAMILIES[name], window=32, max_draft=draft, precision=Precision.preset(preset))
    tile = choose_tile("fold" if kind == "fold" else "step", layout, torch.device("cpu"))
    if kind == "fold":
        source = fold_source(layout, tile, "bf16", ARCH[target])
    else:
        gate = "mamba2" if name == "mamba2" else "softplus"
        source = step_source(layout, tile, gate, name != "mamba2", False, "bf16", ARCH[target])
    compiled = compile_for(source, target, tile.warps, tile.registers)
    assert compiled.metadata.shared <= SHARED[target]
    if not target.startswith("sm"):
        return
    used = resources(compiled, target)
    assert used.registers <= 255
    assert used.spilled <= (ENCODING if kind == "fold" else SPILLED)
    read = preset.partition("+")[2] or preset
    if kind == "decode" and read in CONVERSIONS:
        instruction, targets = CONVERSIONS[read]
        assert (instruction in compiled.asm["ptx"]) == (target in targets)


@pytest.mark.parametrize("draft", [1, 4])
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_a_state_of_few_columns_compiles(name: str, draft: int) -> None:
    """Products take sixteen columns at least, which the interpreter does not ask for."""
    layout = Layout(*FAMILIES[name][:1], 4, 2, 3, 5, window=9, max_draft=draft)
    for kind in ("step", "fold"):
        _compiles(kind, name, layout)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_a_scale_for_all_of_head_dim_compiles(name: str) -> None:
    """A program of several warps holds what an entry counts for, of one head."""
    policy = replace(Precision.preset("float32+fp8"), buffer="fp16_scaled")
    _compiles("step", name, Layout(*FAMILIES[name][:1], 2, 1, 20, 40, window=8, precision=policy))


def _compiles(kind: str, name: str, layout: Layout) -> None:
    tile = choose_tile(kind, layout, torch.device("cpu"))
    if kind == "fold":
        source = fold_source(layout, tile, "bf16", 90)
    else:
        source = step_source(layout, tile, *LAYOUTS[name][1:], False, "bf16", 90)
    compile_for(source, "sm_90", tile.warps, tile.registers)


@pytest.mark.parametrize(
    ("name", "preset"),
    [("mamba2", "int8"), ("mamba2", "fp16sr"), ("gdn", "float32+fp8"), ("gdn", "int8"), ("kda", "int8")],
)
def test_what_a_fold_computes_does_not_depend_on_where_it_goes(name: str, preset: str) -> None:
    """The compiler may join a product and a sum, or not, as the code behind them has it: a checkpoint would differ from
    what ``materialise`` returns, and from copy to copy (I6).
    """
    layout = Layout(
        *FAMILIES[name][:1], 2, 1, 20, 40, window=8, dtype=torch.float32, precision=Precision.preset(preset)
    )
    tile = choose_tile("fold", layout, torch.device("cpu"))
    found = []
    for types in ({}, {"target": "fp32", "copy": None, "stochastic": False}):
        compiled = compile_for(fold_source(layout, tile, "bf16", 90, **types), "sm_90", tile.warps, tile.registers)
        found.append(arithmetic(compiled, ("fold.py", "tile.py")))
    stored, materialised = found
    assert materialised
    # Lines of what they share; the compiler may count an instruction to the line that called.
    assert sum((stored[place] for place in materialised), Counter()) == sum(materialised.values(), Counter())
