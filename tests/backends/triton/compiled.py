"""Compile kernels for GPUs that are not there, and read what the assembler says about registers and spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayssm import Layout
from replayssm.backends.triton.args import Batch, Layer, Shape, Tokens
from replayssm.backends.triton.decode import decode_kernel
from replayssm.backends.triton.fold import fold_kernel
from replayssm.backends.triton.launch import COLUMNS, Tile, copy_shape, fold_shape, make_shape, tokens_at_once
from replayssm.backends.triton.launch import _types as table_types
from replayssm.backends.triton.step import step_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTER = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
ARCH = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "gfx942": 0}


def _pointer(layout: Layout, name: str) -> str:
    """The type of a pointer to a tensor of the layout; that of None where there is none."""
    spec = layout.tensors.get(name)
    return "constexpr" if spec is None else POINTER.get(spec.dtype, "*u8")


class Resources(NamedTuple):
    """What ptxas reports for one kernel."""

    registers: int
    spilled: int
    shared: int


def step_source(layout: Layout, tile: Tile, gate: str, unit: bool, tree: bool, dot: str, arch: int = 0) -> ASTSource:
    act, wide = POINTER[layout.dtype], "*fp32"
    r = layout.recurrence
    channel, head = r.decay == "channel", r.decay == "head"
    read = "checkpoint" if layout.precision.read_copy is None else "read_copy"
    source = {"state": read, "scale": read + "_scale", "head_scale": read + "_head_scale"}
    source |= {"decay": "decay" if head else "", "channels": "decay" if channel else ""}

    def some(present: bool, kind: str) -> str:
        return kind if present else "constexpr"

    layer = Layer(*(_pointer(layout, source.get(field, field)) for field in Layer._fields))
    has_bias = gate in ("mamba2", "softplus", "bounded")
    inputs = Tokens(
        act,
        act,
        act,
        some(head, wide),
        some(channel, wide),
        some(gate != "mamba2", wide),
        some(has_bias, wide),
        some(has_bias, wide),
    )
    strides = Layer(*("i64" if s != "constexpr" else "i32" for s in layer))
    token_strides = Tokens(*("i32" for _ in inputs))
    batch = Batch("*i32", "*i32", some(tree, "*i32"), "*i32", "*i32", "*i32")
    shape = make_shape(layout, tile, gate, unit, tree, tokens_at_once(layout), arch=arch)
    signature = {
        "layer": layer, "strides": strides, "inputs": inputs, "token_strides": token_strides, "batch": batch,
        "out": act, "rows": "i32", "tokens": "i32", "bound": "i32", "slots": "i32", "low": "fp32", "high": "fp32",
        "each": "i32",
    }  # fmt: skip
    constants = {(len(signature),): _with_dot(shape, dot)}
    kernel = decode_kernel if layout.max_draft == 1 else step_kernel
    return _source(kernel, {**signature, "S": "constexpr"}, constants)


def fold_source(layout: Layout, tile: Tile, dot: str, arch: int = 0, **other: Any) -> ASTSource:
    """With other ``Types`` than the layout's where they are given: what ``materialise`` launches, say."""
    types = replace(table_types(layout, torch.zeros(1, len(COLUMNS), 2, dtype=torch.int64)), **other)
    shape = _with_dot(fold_shape(layout, tile, arch), dot)
    signature = {
        "table": "*i64", "work": "*i32", "amount": "*i32", "copies": "i32", "layers": "i32", "seed": "i32",
        "S": "constexpr", "COPIED": "constexpr", "TYPES": "constexpr",
    }  # fmt: skip
    return _source(fold_kernel, signature, {(6,): shape, (7,): copy_shape(layout, shape), (8,): types})


def _with_dot(shape: Shape, dot: str) -> Shape:
    return replace(shape, dot=dot)


def _source(kernel: Any, signature: dict[str, Any], constants: dict[tuple[int, ...], Any]) -> ASTSource:
    """Pointers, strides and sizes as the launcher sees them: divisible by 16 where they are in practice."""
    divisible = [["tt.divisibility", 16]]
    attributes: dict[tuple[int, ...], Any] = {}
    values = dict(constants)
    for index, kind in enumerate(signature.values()):
        parts = list(enumerate(kind)) if isinstance(kind, tuple) else [(None, kind)]
        for inner, part in parts:
            path = (index,) if inner is None else (index, inner)
            if part == "constexpr":
                values.setdefault(path, None)
            elif part.startswith("*") or (isinstance(kind, tuple) and part in ("i64", "i32")):
                attributes[path] = divisible
    return ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)


def compile_for(source: ASTSource, target: str, warps: int, registers: int = 0) -> Any:
    options = {"num_warps": warps}
    if registers and target.startswith("sm"):
        options["maxnreg"] = registers
    return triton.compile(source, target=TARGETS[target], options=options)


def arithmetic(compiled: Any, files: tuple[str, ...]) -> dict[str, Counter[str]]:
    """Float32 instructions of each line of these files, as the assembler left them."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"), "-g", "-c", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    here = ""
    for text in listing.splitlines():
        if place := re.match(r'\s*//## File "([^"]+)", line (\d+)', text):
            here = f"{Path(place[1]).name}:{place[2]}"
        elif here.startswith(files) and (word := re.search(r"\b(FFMA|FMUL|FADD|HMMA)\b", text)):
            found[here][word[1]] += 1
    return dict(found)


def resources(compiled: Any, target: str) -> Resources:
    """Registers and spilled bytes of a CUDA kernel, from the assembler that Triton ships."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if target == "sm_100":
        ptxas = ptxas.with_name("ptxas-blackwell")
    arch = re.search(r"\.target (\w+)", compiled.asm["ptx"])
    assert arch is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        command = [str(ptxas), "-v", f"--gpu-name={arch.group(1)}", str(path), "-o", str(path.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", report), re.findall(r"(\d+) bytes spill stores", report)
    assert registers is not None, report
    return Resources(int(registers.group(1)), sum(map(int, spills)), compiled.metadata.shared)
