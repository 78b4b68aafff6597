"""The kernel that walks tokens compiles for a GPU that is not there, every format of it, without spilling."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compiled import _source, compile_for, resources

from replayssm.drift.kernel import GRIDS, Walk, walk_kernel
from replayssm.drift.loop import Tokens

WARPS = 8


@pytest.mark.parametrize("form", ["fp32", "fp64", "bf16", "fp16sr", "fp8", "int8sr", "nvfp4", "nvfp4sr"])
def test_compiles(form: str) -> None:
    wide = "*fp64" if form == "fp64" else "*fp32"
    delta = form not in ("bf16", "fp64")
    tokens = Tokens(wide, wide, wide, wide, wide)
    shape = Walk(4, 2, 64, 64, 64, 64, delta, form == "fp8", GRIDS.get(form.removesuffix("sr")), form.endswith("sr"))
    signature = {
        "state": wide, "tokens": tokens, "out": wide, "count": "*i32", "seed": "i64", "amount": "i32", "S": "constexpr",
    }  # fmt: skip
    compiled = compile_for(_source(walk_kernel, signature, {(6,): shape}), "sm_90", WARPS)
    used = resources(compiled, "sm_90")
    assert used.spilled == 0
    assert used.registers <= 128
