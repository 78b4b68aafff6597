"""The kernels compile for GPUs that are not there, within a budget of registers, spills and shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compiled import TARGETS, compile_for, fold_source, resources, step_source

from replayssm import GDN, KDA, MAMBA2, Layout
from replayssm.backends.triton.launch import Tile, choose_tile

LAYOUTS = {
    "mamba2": (Layout(MAMBA2, 128, 8, 64, 128, window=32), "mamba2", False),
    "gdn": (Layout(GDN, 64, 16, 128, 128, window=32), "softplus", True),
    "kda": (Layout(KDA, 64, 64, 128, 128, window=16), "softplus", True),
}
VERIFY = Layout(GDN, 64, 16, 128, 128, window=32, max_draft=4)
SPILLED = 64
# Bytes that a program may have on each target.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["decode/mamba2", "decode/kda", "verify/gdn", "fold/gdn", "fold/mamba2"])
def test_compiles_within_budget(kernel: str, target: str) -> None:
    kind, name = kernel.split("/")
    layout, gate, unit = LAYOUTS[name]
    if kind == "fold":
        tile = choose_tile("fold", layout, torch.device("cpu"))
        compiled = compile_for(fold_source(layout, tile, "bf16"), target, tile.warps)
    else:
        tile = choose_tile("step", layout, torch.device("cpu")) if kind == "decode" else Tile(32, 128, 4)
        source = step_source(VERIFY if kind == "verify" else layout, tile, gate, unit, False, "bf16")
        compiled = compile_for(source, target, tile.warps)
    assert compiled.metadata.shared <= SHARED[target]
    if target.startswith("sm"):
        used = resources(compiled, target)
        assert used.registers <= 255
        assert used.spilled <= SPILLED
