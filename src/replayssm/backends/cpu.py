"""The CPU kernels of ``cpu.c`` and ``cpu_formats.h``: compiled once by the machine's C compiler, then kept in a cache.

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
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from replayssm.backends.torch import Batch
from replayssm.checks import ReplayError
from replayssm.formats import Format
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, LinearInputs, Mamba2Inputs
from replayssm.layout import Layout

name = "c"

# Numbers of the formats in cpu_formats.h.
_FORMATS = ("fp32", "bf16", "fp16", "fp8", "fp8_e5m2", "int8", "int4", "nvfp4", "bf16x2", "fp16_scaled")
_ACTIVATIONS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SOURCES = ("cpu.c", "cpu_formats.h", "cpu_vector.h", "cpu_layer.h", "cpu_fused.h", "cpu_fold.h")
# Sums say by themselves that they may be reordered (omp simd); nothing else may, or formats would differ from torch's.
_FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno"]
# Below this many bytes of state, a second thread costs more than it brings.
_PARALLEL_BYTES = 1 << 20
_LARGE, _MADV_HUGEPAGE = 2 << 20, 14


class _Pool(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Stored(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("codes", _Pool), ("scale", _Pool), ("head_scale", _Pool))


_POOLS = ("key", "value", "weight", "decay", "key_scale", "written")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int64) for n in ("heads", "groups", "head_dim", "state_dim", "window")),
        *((n, ctypes.c_int32) for n in ("channel", "delta", "activation_type", "written_type")),
        ("state", _Stored),
        *((n, _Pool) for n in (*_POOLS, "extra")),
        *((n, ctypes.c_void_p) for n in ("slots", "length")),
    )


class _Goal(ctypes.Structure):
    _fields_ = (("target", _Stored), ("copy", _Stored), ("places", ctypes.c_void_p), ("keys", ctypes.c_void_p))


_TOKENS = ("start", "count", "parents", "q", "k", "v", "g", "beta", "gate", "rate", "bias", "out")


class _Tokens(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in _TOKENS),
        ("bound", ctypes.c_float),
        ("gate_type", ctypes.c_int32),
        ("unit", ctypes.c_int32),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be compiled or loaded."""
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    key = hashlib.sha256()
    for item in (
        *(source.read_bytes() for source in sources),
        " ".join([compiler, *_FLAGS]).encode(),
        _processor().encode(),
    ):
        key.update(item)
    file = _folder() / f"cpu-{key.hexdigest()[:16]}.so"
    try:
        if not file.exists():
            _compile(compiler, sources[0], file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError):
        return None


def supports(layout: Layout, layers: list[dict[str, Tensor]]) -> bool:
    """Whether the kernels cover a cache on the CPU: its dtypes, and slots that are contiguous inside."""
    return (
        layout.dtype in _ACTIVATIONS
        and all(_dense(t) for tensors in layers for t in tensors.values())
        and library() is not None
    )


def large_pages(tensor: Tensor) -> Tensor:
    """The same tensor, on 2 MiB pages where Linux has them to give; ask before anything is written to it.

    A pool of states is far larger than what the processor remembers of its small pages.
    """
    start, end = -(-tensor.data_ptr() // _LARGE) * _LARGE, (tensor.data_ptr() + tensor.nbytes) // _LARGE * _LARGE
    if start < end and sys.platform == "linux" and tensor.device.type == "cpu":
        # Advice: where it cannot be followed, the pages stay small.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor


def step(layer: dict[str, Tensor], layout: Layout, inputs: Inputs, batch: Batch) -> Tensor:
    """As ``backends.torch.step``."""
    start = batch.tokens[:, 0].contiguous()
    count = torch.full_like(start, batch.tokens.shape[1]) if batch.valid is None else batch.valid.sum(1)
    parents = None
    if batch.parents is not None:
        parents = torch.full((inputs.tokens,), -1, dtype=torch.int64)
        valid = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.valid is None else batch.valid
        parents[batch.tokens[valid]] = batch.parents[valid]
    make = torch.empty if int(count.sum()) == inputs.tokens else torch.zeros  # what no row owns is zero
    out = make((inputs.tokens, layout.heads, layout.head_dim), dtype=layout.dtype)
    tokens = _tokens(inputs, layout, {"start": start, "count": count, "parents": parents, "out": out})
    record = _record(layer, layout, batch.slots, batch.length, reads=True)
    kernel = _kernel("replay_step")
    _spread(lambda a, b: kernel(ctypes.byref(record), ctypes.byref(tokens), a, b), layout, len(batch.slots))
    return out


def advance(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor) -> Tensor:
    """As ``backends.torch.advance``."""
    out = torch.empty((len(slots), *layout.state_shape), dtype=torch.float32)
    goal = _Goal(target=_Stored(0, _pool(out)))
    _fold(layer, layout, slots, length, goal, torch.arange(len(slots)), None)
    return out


def folds_in_place(layout: Layout) -> bool:
    """As ``backends.torch.folds_in_place``: every layout that the kernels cover."""
    return layout.dtype in _ACTIVATIONS


def fold_in_place(
    layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, keys: Tensor | None = None
) -> None:
    """As ``backends.torch.fold_in_place``, read copies and stochastic rounding included.

    Args:
        layer, layout, slots, length: as there.
        keys: [R] int64 of ``rounding.row_keys``, where the policy rounds stochastically.
    """
    policy = layout.precision
    goal = _Goal(target=_stored("checkpoint", policy.checkpoint_format, layer))
    if policy.read_format is not None:
        goal.copy = _stored("read_copy", policy.read_format, layer)
    _fold(layer, layout, slots, length, goal, slots, keys)


def _fold(
    layer: dict[str, Tensor],
    layout: Layout,
    slots: Tensor,
    length: Tensor,
    goal: _Goal,
    places: Tensor,
    keys: Tensor | None,
) -> None:
    goal.places = places.data_ptr()
    goal.keys = None if keys is None else keys.data_ptr()
    record = _record(layer, layout, slots, length, reads=False)
    kernel = _kernel("replay_fold")
    _spread(lambda a, b: kernel(ctypes.byref(record), ctypes.byref(goal), a, b), layout, len(slots))


def _tokens(inputs: Inputs, layout: Layout, batch: dict[str, Tensor | None]) -> _Tokens:
    """Tokens as the kernels take them: raw, but for gates that are one number a head."""
    held = dict(batch)
    if isinstance(inputs, Mamba2Inputs):
        held |= {"q": inputs.C, "k": inputs.B, "v": inputs.x}
    elif isinstance(inputs, GdnInputs | KdaInputs | LinearInputs):
        held |= {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    else:
        raise ReplayError(
            f"inputs: the CPU kernels take Mamba2Inputs, GdnInputs, KdaInputs and LinearInputs, got "
            f"{type(inputs).__name__}; give what it lowers to as LinearInputs"
        )
    tokens = _Tokens(unit=not isinstance(inputs, Mamba2Inputs) and getattr(inputs, "unit", True))
    if isinstance(inputs, KdaInputs):
        held |= {"gate": inputs.a, "rate": inputs.A_log.float().exp(), "bias": inputs.dt_bias.float()}
        held["beta"] = torch.sigmoid(inputs.b.float())
        tokens.gate_type, tokens.bound = _ACTIVATIONS[inputs.a.dtype], inputs.lower_bound or 0
    else:
        held["g"], held["beta"] = inputs.gates(layout)
    tokens.held = {name: x.contiguous() for name, x in held.items() if x is not None}  # alive as long as the record
    for name, x in tokens.held.items():
        setattr(tokens, name, x.data_ptr())
    return tokens


def _record(layer: dict[str, Tensor], layout: Layout, slots: Tensor, length: Tensor, reads: bool) -> _Layer:
    """A layer as the kernels take it; ``reads``: of what steps read, be it a copy, else of the checkpoint."""
    policy, recurrence = layout.precision, layout.recurrence
    if reads and policy.read_format is not None:
        state = _stored("read_copy", policy.read_format, layer)
    else:
        state = _stored("checkpoint", policy.checkpoint_format, layer)
    extra = layer.get("written_low", layer.get("written_scale"))
    record = _Layer(
        *(layout.heads, layout.groups, layout.head_dim, layout.state_dim, layout.window),
        *(recurrence.decay == "channel", recurrence.update == "delta"),
        *(_ACTIVATIONS[layout.dtype], _FORMATS.index(layout.written_format.name)),
        state,
        *(_pool(tensor) for tensor in (*map(layer.get, _POOLS), extra)),
        *(slots.data_ptr(), length.data_ptr()),
    )
    record.held = (slots, length)  # alive as long as the record is
    return record


def _stored(name: str, form: Format, layer: dict[str, Tensor]) -> _Stored:
    """The tensors of a format."""
    pools = (_pool(layer.get(name + suffix)) for suffix in ("", "_scale", "_head_scale"))
    return _Stored(_FORMATS.index(form.name), *pools)


def _pool(tensor: Tensor | None) -> _Pool:
    return _Pool(None, 0) if tensor is None else _Pool(tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)


def _spread(kernel: Callable[[int, int], int], layout: Layout, rows: int) -> None:
    """Run the kernel over all groups of all rows, on as many threads as torch uses."""
    items = rows * layout.groups
    if not items:
        return
    threads = torch.get_num_threads()
    if rows * prod(layout.state_shape) * 4 < _PARALLEL_BYTES or threads == 1:
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
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2
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
