"""The CPU kernels of ``cpu.c``: compiled once with the machine's C compiler, kept in the user's cache folder.

Where there is no compiler, or for layouts that the kernels do not cover (float64, views with inner strides), the torch
backend does the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from replayssm.backends.torch import Batch
from replayssm.inputs import Inputs
from replayssm.layout import Layout

name = "c"

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Sums may be reordered, or they would not vectorise. NaN and infinities keep their meaning.
_FLAGS = ["-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
# Below this many bytes of state, a second thread costs more than it brings.
_PARALLEL_BYTES = 1 << 20


class _Pool(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


_POOLS = ("state", "key", "value", "weight", "decay", "key_scale", "written")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int64) for n in ("heads", "groups", "head_dim", "state_dim", "window")),
        *((n, ctypes.c_int32) for n in ("channel", "delta", "state_type", "activation_type", "written_type")),
        *((n, _Pool) for n in _POOLS),
        *((n, ctypes.c_void_p) for n in ("slots", "length")),
    )


_TOKENS = ("start", "count", "parents", "q", "k", "g", "beta", "scale", "raw_k", "raw_v", "out")


class _Tokens(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_void_p) for n in _TOKENS)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be compiled or loaded."""
    source = Path(__file__).with_name("cpu.c")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    key = hashlib.sha256()
    for item in (source.read_bytes(), " ".join([compiler, *_FLAGS]).encode(), _processor().encode()):
        key.update(item)
    file = _folder() / f"cpu-{key.hexdigest()[:16]}.so"
    try:
        if not file.exists():
            _compile(compiler, source, file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError):
        return None


def supports(layout: Layout, layers: list[dict[str, Tensor]]) -> bool:
    """Whether the kernels cover a cache on the CPU: its dtypes, and slots that are contiguous inside."""
    typed = all(s.dtype in _TYPES for s in layout.tensors.values())
    return typed and all(_dense(t) for tensors in layers for t in tensors.values()) and library() is not None


def step(layer: dict[str, Tensor], layout: Layout, inputs: Inputs, batch: Batch) -> Tensor:
    """As ``backends.torch.step``."""
    lowered = inputs.lower(layout)
    key = lowered.k.to(torch.float32)
    if lowered.key_scale is not None:
        key = key * lowered.key_scale[..., None]
    start = batch.tokens[:, 0].contiguous()
    count = torch.full_like(start, batch.tokens.shape[1]) if batch.valid is None else batch.valid.sum(1)
    parents = None
    if batch.parents is not None:
        parents = torch.full((inputs.tokens,), -1, dtype=torch.int64)
        valid = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.valid is None else batch.valid
        parents[batch.tokens[valid]] = batch.parents[valid]
    out = torch.zeros((inputs.tokens, layout.heads, layout.head_dim), dtype=layout.dtype)
    held = [start, count, parents, lowered.q, key, lowered.g, lowered.beta, lowered.key_scale, lowered.k, lowered.v]
    held = [None if x is None else x.contiguous() for x in held]
    tokens = _Tokens(*(None if x is None else x.data_ptr() for x in held), out.data_ptr())
    record = _record(layer, layout, batch.slots, batch.length, "read_copy" if "read_copy" in layer else "checkpoint")
    kernel = _kernel("replay_step")
    _spread(lambda a, b: kernel(ctypes.byref(record), ctypes.byref(tokens), a, b), layout, len(batch.slots))
    return out


def advance(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor) -> Tensor:
    """As ``backends.torch.advance``."""
    out = torch.empty((len(slots), *layout.state_shape), dtype=torch.float32)
    row_bytes = out[0].nbytes if len(out) else 0
    _fold_to(out, layer, layout, slots, length, torch.arange(len(slots)) * row_bytes)
    return out


def folds_in_place(layout: Layout) -> bool:
    """As ``backends.torch.folds_in_place``."""
    return layout.precision.checkpoint == torch.float32 and layout.precision.read_copy is None


def fold_in_place(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor) -> None:
    """As ``backends.torch.fold_in_place``."""
    checkpoint = layer["checkpoint"]
    _fold_to(checkpoint, layer, layout, slots, length, slots * checkpoint.stride(0) * checkpoint.itemsize)


def _fold_to(
    to: Tensor, layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, where: Tensor
) -> None:
    record = _record(layer, layout, slots, length, "checkpoint")
    places = where.to(torch.int64).contiguous()
    kernel = _kernel("replay_fold")
    target, offsets = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(places.data_ptr())
    _spread(lambda a, b: kernel(ctypes.byref(record), target, offsets, a, b), layout, len(slots))


def _record(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, state: str) -> _Layer:
    tensors = [layer.get(state if pool == "state" else pool) for pool in _POOLS]
    pools = [_Pool(None, 0) if t is None else _Pool(t.data_ptr(), t.stride(0) * t.itemsize) for t in tensors]
    written = _TYPES[layer["written"].dtype] if "written" in layer else 0
    recurrence = layout.recurrence
    record = _Layer(
        *(layout.heads, layout.groups, layout.head_dim, layout.state_dim, layout.window),
        *(recurrence.decay == "channel", recurrence.update == "delta"),
        *(_TYPES[layer[state].dtype], _TYPES[layout.dtype], written),
        *pools,
        *(slots.data_ptr(), length.data_ptr()),
    )
    record.held = (slots, length)  # alive as long as the record is
    return record


def _spread(kernel: Callable[[int, int], int], layout: Layout, rows: int) -> None:
    """Run the kernel over all groups of all rows, on as many threads as torch uses."""
    items = rows * layout.groups
    if not items:
        return
    threads = torch.get_num_threads()
    if rows * layout.tensors["checkpoint"].nbytes < _PARALLEL_BYTES or threads == 1:
        codes = [kernel(0, items)]
    else:
        size = -(-items // (4 * threads))  # a few pieces a thread: rows are of different lengths
        pool = _threads(threads, os.getpid())
        codes = list(pool.map(lambda a: kernel(a, min(a + size, items)), range(0, items, size)))
    if any(codes):
        raise MemoryError("replayssm: no memory for the work space of a CPU kernel")


@lru_cache(maxsize=1)
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads that call the kernels, which run without the interpreter's lock. A forked process gets its own."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"replayssm-{process}")


@lru_cache(maxsize=2)
def _kernel(symbol: str) -> Callable[..., int]:
    found = library()
    assert found is not None
    function = getattr(found, symbol)
    arguments = 2 if symbol == "replay_step" else 3
    function.argtypes = [ctypes.c_void_p] * arguments + [ctypes.c_int64] * 2
    function.restype = ctypes.c_int
    return function


def _dense(tensor: Tensor) -> bool:
    """Whether each slot is one contiguous block."""
    return tensor[:1].is_contiguous() and tensor.device.type == "cpu"


def _compile(compiler: str, source: Path, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        built = Path(folder) / file.name
        command = [compiler, *_FLAGS, "-shared", "-fPIC", str(source), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        built.replace(file)  # at once, so that another process never loads half a file


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "replayssm"


def _processor() -> str:
    """What -march=native depends on: code made for one processor must not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("flags")), platform.processor())
    except OSError:
        return platform.machine() + platform.processor()
