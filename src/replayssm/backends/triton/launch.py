"""The Triton backend of a cache on a CUDA device: what the verbs launch. Nothing here waits for the device.

Checks of what the host can see (shapes, dtypes, devices) raise at once. Values that live on the device are checked by
the kernels: the offending row writes nothing, and ``check`` raises at the next host read.
"""

# Parameters that a kernel calls constexpr take plain numbers.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm import checks
from replayssm.backends.triton import formats
from replayssm.backends.triton.args import Batch, Books, Layer, Shape, Tokens, Types
from replayssm.backends.triton.commit import NOBODY, commit_kernel, compact_kernel
from replayssm.backends.triton.conv import compact_conv_kernel, conv_kernel
from replayssm.backends.triton.decode import decode_kernel
from replayssm.backends.triton.fold import fold_kernel
from replayssm.backends.triton.step import step_kernel
from replayssm.checks import ReplayError
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, LinearInputs, Mamba2Inputs
from replayssm.layout import Layout
from replayssm.rounding import seed_bits
from replayssm.rows import Rows

MAX_DRAFT, MAX_WINDOW = 16, 128
ELEMENT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INFINITY = float("inf")
# Plain formats are called by their dtype in tables of tiles.
_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Columns of the address table, in the order that ``fold.tensor_of`` documents.
COLUMNS = (
    "checkpoint", "key", "value", "weight", "decay", "channels", "key_scale", "written", "target", "copy",
    "checkpoint_scale", "checkpoint_head_scale", "read_copy_scale", "read_copy_head_scale",
    "written_scale", "written_low",
)  # fmt: skip
# What went wrong with a row, by the code that a kernel reports.
FAULTS = {
    1: "slots: row {row} has slot {value}, which is not in the cache",
    2: "offsets: row {row} starts before 0, ends before it starts, or ends after the inputs",
    3: "rows: row {row} brings {value} tokens, more than the layout's max_draft",
    4: "step: row {row} brings {value} tokens to a layer that holds uncommitted ones of an earlier step; commit them "
    "first (accepted=0 drops them)",
    5: "step: row {row} has no room for {value} tokens in its window",
    6: "parents: row {row} has a token whose parent is neither -1 nor an earlier token of its row",
    7: "accepted: row {row} accepts fewer than 0 or more tokens than it drafted",
    8: "slots: the slot of row {row} comes twice in the batch",
    9: "path: that of row {row} is no line of its drafts from the root, each the child of the one before (a tree row "
    "that accepts several tokens needs path=)",
    10: "commit: row {row} accepts tokens, but some layer was not stepped with these rows",
}


class Cache(Protocol):
    """What a cache shows to its backend."""

    layout: Layout
    layers: int
    slots: int
    seed: int
    device: torch.device
    length: Tensor
    folds: Tensor
    _limit: Tensor
    _position: Tensor
    _drafts: Tensor
    _tensors: list[dict[str, Tensor]]


@dataclass(frozen=True)
class Tile:
    """Launch knobs of one kernel.

    Attributes:
        p, k: rows and columns of a tile of the state. A fold that walks has parts of 32 columns whatever k is, a verify
            step parts of 64 bytes.
        warps: a program.
        programs: a multiprocessor: the size of the fold's fixed grid, and what a step expects to run side by side.
        registers: most registers a thread; 0: the compiler's choice.
        stages: tiles of the state that a step has on their way at once; 1: straight to registers. A fold has one.
        heads: of a tile in decode, of which each has p / heads rows of it; fewer where fewer share a key.
    """

    p: int
    k: int
    warps: int
    programs: int = 16
    registers: int = 0
    stages: int = 2
    heads: int = 1

    @property
    def options(self) -> dict[str, int]:
        """What a launch takes beside the kernel's own arguments."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, **limit}


def tile_key(kernel: str, layout: Layout) -> str:
    """The name of a tile in a table: what a kernel's speed depends on. ``kernel`` is "step" or "fold".

    A step's tile goes by what it reads, a fold's by the checkpoint and its copy.
    """
    r, policy = layout.recurrence, layout.precision
    kept = [form.name for form in (policy.checkpoint_format, policy.read_format) if form is not None]
    if kernel == "step":
        kernel, kept = "decode" if layout.max_draft == 1 else "verify", kept[-1:]
    size = f"{layout.head_dim}x{layout.state_dim}"
    return f"{kernel}/{r.decay}/{r.update}/{size}/{'+'.join(_LONG.get(name, name) for name in kept)}"


def table_file(folder: Path, device: str) -> Path:
    """A GPU's file in a folder of tables: its name, lower case with underscores."""
    return folder / (device.lower().replace(" ", "_") + ".json")


@functools.cache
def tile_table(device: str) -> dict[str, list[int]]:
    """The measured tiles of a GPU: those that come with the library, under those of the folder $REPLAYSSM_TILES."""
    folders = [Path(__file__).parent / "tiles"]
    if chosen := os.environ.get("REPLAYSSM_TILES"):
        folders.append(Path(chosen))
        if not folders[1].is_dir():
            raise ReplayError(f"REPLAYSSM_TILES: {chosen} is no folder")
    found: dict[str, list[int]] = {}
    for path in (table_file(folder, device) for folder in folders):
        if path.exists():
            found |= read_table(path)
    return found


def read_table(path: Path) -> dict[str, list[int]]:
    """The tiles of a file, by ``tile_key``; each lists the fields of ``Tile`` in order."""
    most = len(fields(Tile))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["tiles"]
        if all(2 < len(tile) <= most and all(type(knob) is int for knob in tile) for tile in found.values()):
            return found
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # no such table, as the message says
    raise ReplayError(f'{path}: expected {{"tiles": {{key: 3…{most} integers}}}}, as `replayssm tune` writes it')


def walks(layout: Layout) -> bool:
    """Whether a fold takes one entry after another, each of which may read the state, instead of blocks of them."""
    plain = formats.is_plain(layout.precision.checkpoint_format.name)
    return layout.recurrence.decay == "channel" or (layout.recurrence.update == "delta" and not plain)


def decodes(layout: Layout) -> bool:
    """Whether steps are those of ``decode``: one token a row."""
    return layout.max_draft == 1


def tokens_at_once(layout: Layout) -> int:
    """See ``Shape.BT``. Queries and keys together are eight columns of a product at least, where both are read."""
    if decodes(layout):
        return 1
    both = layout.recurrence.update == "delta" or layout.recurrence.decay == "channel"
    return int(max(4 if both else 8, triton.next_power_of_2(layout.max_draft)))


def least_rows(kernel: str, layout: Layout) -> int:
    """Rows that a tile must have: 1 where any power of two of at least 16 does.

    The scale of a head's four-bit checkpoint comes from all of its elements, that of an entry of "fp16_scaled" from all
    of head_dim.
    """
    rows = 1
    four = formats.planes(layout.precision.checkpoint_format.name) == 2
    if four if kernel == "fold" else "written_scale" in layout.tensors:
        rows = max(16, triton.next_power_of_2(layout.head_dim))
    return int(rows)


def choose_tile(kernel: str, layout: Layout, device: torch.device) -> Tile:
    """The measured tile of this GPU and layout, else a heuristic.

    Heuristic, from sweeps on an H200. Decode has one warp a program, so that products need no other's rows: 16 rows of
    float32, 32 of narrower formats, of two heads of a key where there are as many; columns in parts of 64 bytes, as
    four threads of a row load them. A fold that walks keeps 64 floats a thread, four programs a multiprocessor; others
    have a warp for 16 rows. A verify step has one warp, as many rows as registers hold, and more tiles on their way
    where they are small. Formats that need a whole head at once have more warps.
    """
    if device.type == "cuda":
        found = tile_table(torch.cuda.get_device_name(device)).get(tile_key(kernel, layout))
        if found:
            return Tile(*found)
    least = least_rows(kernel, layout)
    columns = max(16, triton.next_power_of_2(layout.state_dim))
    rows = max(16, min(64, triton.next_power_of_2(layout.head_dim), 8192 // columns))
    while rows > 16 and layout.head_dim % rows:
        rows //= 2
    more = max(1, least // rows)
    if kernel == "fold":
        if walks(layout):
            return Tile(
                rows * more,
                min(32, columns),
                min(16, max(1, rows * more * columns // 2048)),
                programs=4,
                registers=128,
                stages=1,
            )
        if formats.is_plain(layout.precision.checkpoint_format.name):
            return Tile(16, columns, 1, programs=8, stages=1)
        rows = max(16, rows // 2, least)
        return Tile(rows, columns, min(16, max(1, rows // 8)), programs=4, stages=1)
    if layout.max_draft > 1:
        if least > 1:
            return Tile(least, columns, min(16, max(1, least // 32)), programs=4, stages=1)
        stages = 2 if formats.is_plain(layout.precision.steps_read.name) else 3
        if layout.recurrence.decay == "channel":
            return Tile(16, columns, 1, programs=8, stages=stages)
        if layout.head_dim % 32:
            return Tile(16, columns, 1, programs=12, registers=168, stages=stages)
        return Tile(32, columns, 1, programs=8, stages=stages)
    read = layout.precision.steps_read
    channel = layout.recurrence.decay == "channel"
    pair = 1 if channel or layout.heads // layout.groups % 2 else 2
    if not formats.is_plain(read.name):
        width = max(16, min(64, triton.next_power_of_2(formats.plane(read.name, layout.state_dim))))
        if least > 1:
            return Tile(least, width, min(16, max(1, least // 8)), programs=4, registers=128)
        return Tile(32, width, 1, registers=128, stages=1, heads=pair)
    width = min(32, columns)
    if least > 1:
        return Tile(least, width, max(1, least // 16), programs=2, registers=128, stages=1)
    if read.name != "fp32":
        return Tile(32, width, 1, registers=128, stages=1, heads=pair)
    if layout.recurrence.update == "add" and not channel:
        return Tile(16, width, 1, programs=12, registers=168, stages=1, heads=1 if layout.head_dim % 32 else pair)
    return Tile(16, width, 1, registers=128)


@dataclass(frozen=True)
class Raw:
    """Inputs as the kernels take them: tensors with one stride between tokens, and the words of their gate."""

    tensors: Tokens
    gate: str
    unit: bool = False
    low: float = 0.0
    high: float = 1.0


def raw_inputs(inputs: Inputs, layout: Layout) -> Raw:
    """Name a family's tensors by their part in the recurrence."""
    if isinstance(inputs, Mamba2Inputs):
        low, high = inputs.dt_limit or (0.0, INFINITY)
        tensors = Tokens(inputs.C, inputs.B, inputs.x, inputs.dt, None, None, inputs.A, inputs.dt_bias)
        return Raw(tensors, "mamba2", low=low, high=high)
    if isinstance(inputs, GdnInputs):
        i = inputs
        tensors = Tokens(i.q, i.k, i.v, i.a, None, i.b, i.A_log, i.dt_bias)
        return Raw(tensors, "softplus", True, high=2.0 if i.allow_neg_eigval else 1.0)
    if isinstance(inputs, KdaInputs):
        i = inputs
        tensors = Tokens(i.q, i.k, i.v, None, i.a, i.b, i.A_log, i.dt_bias)
        if i.lower_bound is None:
            return Raw(tensors, "softplus", True)
        return Raw(tensors, "bounded", True, low=float(i.lower_bound))
    if isinstance(inputs, LinearInputs):
        i = inputs
        channel = layout.recurrence.decay == "channel"
        a, channels = (None, i.g) if channel else (i.g, None)
        return Raw(Tokens(i.q, i.k, i.v, a, channels, i.beta, None, None), "linear", i.unit)
    raise ReplayError(
        f"inputs: the Triton backend takes Mamba2Inputs, GdnInputs, KdaInputs and LinearInputs, got "
        f"{type(inputs).__name__}; lower it to LinearInputs"
    )


def inner_contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself if only its first dimension has a free stride (a view of a packed projection), else a copy."""
    if tensor is None or tensor.ndim < 2:
        return tensor if tensor is None else tensor.contiguous()
    expected = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


class Kernels:
    """The verbs of one cache on the device."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        layout = cache.layout
        _expect_supported(layout, cache.device)
        self.device = cache.device
        self.error = torch.zeros(3, dtype=torch.int32, device=cache.device)
        owner = torch.full_like(cache.length, NOBODY.value)
        self.books = Books(cache.length, cache.folds, cache._limit, cache._position, cache._drafts, owner, self.error)
        self._layers = [_layer_args(tensors, layout, index) for index, tensors in enumerate(cache._tensors)]
        self._addresses = torch.tensor([_address_line(tensors, layout) for tensors in cache._tensors])
        self.table = self._addresses.to(cache.device)
        self._types = _types(layout, self._addresses)
        if layout.conv is not None:
            rings = [[t["conv"].data_ptr(), t["conv"].stride(0) * t["conv"].itemsize] for t in cache._tensors]
            self._rings = torch.tensor(rings).to(cache.device)
        self.tiles: dict[str, Tile] = {}

    # The verbs ------------------------------------------------------------------------------------------------------

    def step(self, layer: int, inputs: Inputs, rows: Rows) -> Tensor:
        """See ``replayssm.step``; shapes, dtypes and devices of the inputs are checked already."""
        cache, layout = self.cache, self.cache.layout
        rows = self.on_device(rows)
        raw = raw_inputs(inputs, layout)
        tensors = Tokens(*(inner_contiguous(t) for t in raw.tensors))
        assert isinstance(tensors.v, Tensor)
        out = torch.empty((inputs.tokens, layout.heads, layout.head_dim), dtype=layout.dtype, device=self.device)
        amount = len(rows.slots)
        if amount == 0:
            return out.zero_()
        tile = self.tile("step")
        shape = self._shape(tile, raw.gate, raw.unit, rows.parents is not None)
        batch = Batch(rows.slots, rows.offsets, rows.parents, cache.length, cache._drafts[0, layer], self.error)
        pointers, strides = self._layers[layer]
        arguments = (
            pointers,
            strides,
            tensors,
            Tokens(*(0 if t is None else t.stride(0) for t in tensors)),
            batch,
            out,
            amount,
            inputs.tokens,
            _bound(rows, inputs.tokens),
            cache.slots,
            raw.low,
            raw.high,
        )
        programs = _processors(self.device) * tile.programs
        if decodes(layout):
            kernel, sets = decode_kernel, amount * layout.heads // shape.N
            most = triton.cdiv(layout.head_dim * shape.N, tile.p)
        else:
            kernel, sets = step_kernel, amount * layout.heads // shape.share
            most = triton.cdiv(layout.head_dim, tile.p) * shape.share
        each = balanced(most, sets, programs)
        grid = (sets * triton.cdiv(most, each),)
        kernel[grid](*arguments, each, S=shape, **tile.options)
        return out

    def conv_step(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, activation: str | None
    ) -> Tensor:
        """See ``replayssm.conv_step``; shapes, dtypes and devices are checked already."""
        cache, layout = self.cache, self.cache.layout
        conv = layout.conv
        assert conv is not None
        rows = self.on_device(rows)
        line, taps = inner_contiguous(x), weight.contiguous()
        assert line is not None
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        amount = len(rows.slots)
        if amount == 0:
            return out.zero_()
        ring = cache._tensors[layer]["conv"]
        block = min(256, triton.next_power_of_2(conv.channels))
        batch = Batch(rows.slots, rows.offsets, rows.parents, cache.length, cache._drafts[1, layer], self.error)
        conv_kernel[(amount * triton.cdiv(conv.channels, block),)](
            ring,
            ring.stride(0),
            line,
            line.stride(0),
            taps,
            None if bias is None else bias.contiguous(),
            batch,
            cache._position,
            out,
            amount,
            x.shape[0],
            _bound(rows, x.shape[0]),
            cache.slots,
            C=conv.channels,
            WIDTH=conv.width,
            W=layout.window,
            T=layout.max_draft,
            SILU=activation == "silu",
            BC=block,
            num_warps=4,
        )
        return out

    def commit(
        self, rows: Rows, accepted: Tensor | Sequence[int], path: Tensor | Sequence[Sequence[int]] | None
    ) -> None:
        """See ``ReplayCache.commit``: bookkeeping, a tree's compaction, and the fold of full rows in every layer."""
        rows = self.on_device(rows)
        taken = checks.int_vector("accepted", accepted, self.device)
        amount = len(rows.slots)
        if len(taken) != amount:
            raise ReplayError(f"accepted: expected one entry a row ({amount}), got {len(taken)}")
        line = self._path(path, amount)
        self._advance(rows, taken, line)

    def fold(self, slots: Tensor | Sequence[int]) -> None:
        """See ``ReplayCache.fold``."""
        vector = checks.int_vector("slots", slots, self.device)
        self._advance(Rows(vector, torch.zeros(1, dtype=torch.int32, device=self.device)), None, None)

    def materialise(self, layer: int, slots: Tensor) -> Tensor:
        """States after the committed tokens: [R, H, P, K] float32 for slots [R] int64 that are in the cache."""
        layout = self.cache.layout
        out = torch.empty((len(slots), *layout.state_shape), dtype=torch.float32, device=self.device)
        if not len(slots):
            return out
        table = self._addresses[layer : layer + 1].clone()
        table[0, COLUMNS.index("target")] = torch.tensor([out.data_ptr(), out.stride(0) * out.itemsize])
        index = slots.to(torch.int32)
        number = torch.arange(len(slots), dtype=torch.int32, device=self.device)
        work = torch.stack([index, self.cache.length[slots], number, torch.zeros_like(index)])
        amount = torch.full((1,), len(slots), dtype=torch.int32, device=self.device)
        types = replace(self._types, target="fp32", copy=None, stochastic=False)
        self._launch_fold(table.to(self.device), work, amount, len(slots), 1, types)
        return out

    def check(self) -> None:
        """Raise for the first fault that a kernel reported since the last check. Waits for the device."""
        code, row, value = self.error.tolist()
        if code:
            self.error.zero_()
            raise ReplayError(FAULTS[code].format(row=row, value=value) + " (checked on the device; it wrote nothing)")

    # Internal -------------------------------------------------------------------------------------------------------

    def tile(self, kernel: str) -> Tile:
        """The knobs of a kernel; ``tiles`` overrides the table (for tuning)."""
        if kernel not in self.tiles:
            self.tiles[kernel] = choose_tile(kernel, self.cache.layout, self.device)
        tile, rows = self.tiles[kernel], least_rows(kernel, self.cache.layout)
        if tile.p < rows:
            raise ReplayError(f"tile: {kernel} of this layout needs at least {rows} rows, got {tile.p}")
        return tile

    def on_device(self, rows: Rows) -> Rows:
        """Rows on the cache's device. Rows made on the host are checked there and copied once."""
        if not isinstance(rows, Rows):
            raise ReplayError(f"rows: expected Rows, got {type(rows).__name__}")
        if len(rows.offsets) != len(rows.slots) + 1:
            raise ReplayError(f"offsets: expected rows + 1 = {len(rows.slots) + 1} entries, got {len(rows.offsets)}")
        if rows.slots.device == self.device:
            return rows
        moved = getattr(rows, "_moved", None)
        if moved is None or moved.slots.device != self.device:
            rows.host(self.cache.slots, self.cache.layout.max_draft)
            parents = None if rows.parents is None else rows.parents.to(self.device)
            moved = Rows(rows.slots.to(self.device), rows.offsets.to(self.device), parents)
            object.__setattr__(rows, "_moved", moved)
        return moved

    def _advance(self, rows: Rows, taken: Tensor | None, path: Tensor | None) -> None:
        cache, layout = self.cache, self.cache.layout
        amount = len(rows.slots)
        if amount == 0:
            return
        work = torch.empty((4, amount), dtype=torch.int32, device=self.device)
        moves = torch.empty((3, amount), dtype=torch.int32, device=self.device)
        folding = torch.empty(1, dtype=torch.int32, device=self.device)
        lines = cache.layers * (1 if layout.conv is None else 2)
        width = triton.next_power_of_2(lines)
        block = min(triton.next_power_of_2(amount), max(1, 8192 // width), 1024)
        path_width = 0 if path is None else path.shape[1]
        commit_kernel[(1,)](
            Batch(rows.slots, rows.offsets, rows.parents, None, None, None),
            self.books,
            taken,
            path,
            path_width,
            work,
            moves,
            folding,
            amount,
            cache.slots,
            _bound(rows, 2**31 - 1),
            BOOKS=lines,
            RING=0 if layout.conv is None else layout.tensors["conv"].shape[1],
            T=layout.max_draft,
            ROOM=layout.room,
            BR=block,
            BL=width,
            num_warps=4 if block * width <= 1024 else 8,
        )
        if path is not None:
            self._compact(rows, path, moves)
        self._launch_fold(self.table, work, folding, amount, cache.layers, self._types)

    def _launch_fold(self, table: Tensor, work: Tensor, amount: Tensor, copies: int, layers: int, types: Types) -> None:
        layout, tile = self.cache.layout, self.tile("fold")
        shape = fold_shape(layout, tile, _capability(self.device))
        pieces = copies * layers * layout.heads * triton.cdiv(layout.head_dim, tile.p)
        grid = (min(pieces, _processors(self.device) * tile.programs),)
        fold_kernel[grid](
            table,
            work,
            amount,
            copies,
            layers,
            seed_bits(self.cache.seed),
            S=shape,
            COPIED=copy_shape(layout, shape),
            TYPES=types,
            **tile.options,
        )

    def _compact(self, rows: Rows, path: Tensor, moves: Tensor) -> None:
        cache, layout = self.cache, self.cache.layout
        amount = len(rows.slots)
        shape = self._shape(self.tile("fold"))
        compact_kernel[(amount * cache.layers * layout.heads,)](
            self.table,
            rows.slots,
            path,
            path.shape[1],
            moves,
            amount,
            cache.layers,
            S=shape,
            TYPES=self._types,
            BT=triton.next_power_of_2(layout.max_draft),
            BP=triton.next_power_of_2(layout.head_dim),
            BK=triton.next_power_of_2(layout.state_dim),
        )
        if layout.conv is not None:
            block = min(256, triton.next_power_of_2(layout.conv.channels))
            compact_conv_kernel[(amount * cache.layers * triton.cdiv(layout.conv.channels, block),)](
                self._rings,
                rows.slots,
                path,
                path.shape[1],
                moves,
                amount,
                cache.layers,
                C=layout.conv.channels,
                RING=layout.tensors["conv"].shape[1],
                BT=triton.next_power_of_2(layout.max_draft),
                BC=block,
                DTYPE=ELEMENT[layout.dtype],
            )

    def _path(self, path: Tensor | Sequence[Sequence[int]] | None, amount: int) -> Tensor | None:
        if path is None:
            return None
        if not isinstance(path, Tensor):
            lines = [list(line) for line in path]
            width = max((len(line) for line in lines), default=0)
            path = torch.tensor([line + [-1] * (width - len(line)) for line in lines], dtype=torch.int32)
        if path.ndim != 2 or path.dtype not in (torch.int32, torch.int64):
            raise ReplayError(f"path: expected integers [R, T], got {checks.dtype_name(path.dtype)} {list(path.shape)}")
        if len(path) != amount:
            raise ReplayError(f"path: expected one line a row ({amount}), got {len(path)}")
        return path.to(device=self.device, dtype=torch.int32).contiguous()

    def _shape(self, tile: Tile, gate: str = "linear", unit: bool = False, tree: bool = False) -> Shape:
        layout = self.cache.layout
        return make_shape(layout, tile, gate, unit, tree, tokens_at_once(layout), arch=_capability(self.device))


def _bound(rows: Rows, tokens: int) -> int:
    """Tokens that have what they need: a tree's parents may be fewer than the inputs, whose end is padding."""
    return tokens if rows.parents is None else min(tokens, len(rows.parents))


def balanced(most: int, sets: int, programs: int) -> int:
    """Blocks that one program of decode takes: of ``most`` a set has, cut so that ``programs`` at a time end together.

    A program costs its blocks and about one and a half of them for what it computes first.
    """

    def cost(each: int) -> float:
        return -(-sets * -(-most // each) // programs) * (each + 1.5)

    return min(range(most, 0, -1), key=cost)


def make_shape(layout: Layout, tile: Tile, gate: str, unit: bool, tree: bool, tokens: int, arch: int = 0) -> Shape:
    """The compile-time record of a launch. BE: the whole window for the step, blocks of 16 for the fold.

    A step of several tokens takes columns as ``tile.ordered`` wants them: four threads a row, sixteen bytes each.
    """
    share = 1 if layout.recurrence.decay == "channel" else layout.heads // layout.groups
    heads = 1
    while share % (2 * heads) == 0 and 2 * heads <= tile.heads:
        heads *= 2
    columns = max(16, triton.next_power_of_2(layout.state_dim))
    read = layout.precision.steps_read.name
    half = formats.plane(read, layout.state_dim)
    if tokens > 1:
        piece = max(16, min(64 // formats.element_bytes(read), triton.next_power_of_2(half)))
        pieces = triton.cdiv(half, piece)
    else:
        piece, pieces = tile.k, triton.next_power_of_2(triton.cdiv(half, tile.k))
    return Shape(
        layout.heads,
        layout.groups,
        layout.head_dim,
        layout.state_dim,
        layout.window,
        layout.max_draft,
        BT=tokens,
        BE=max(16, triton.next_power_of_2(layout.window)),
        BP=tile.p,
        BK=piece,
        C=formats.planes(read) * pieces,
        KP=columns,
        N=heads,
        share=share,
        lanes=triton.next_power_of_2(share),
        stages=tile.stages,
        update=layout.recurrence.update,
        gate=gate,
        unit=unit,
        tree=tree and layout.max_draft > 1,
        dot="interpret" if triton.knobs.runtime.interpret else "bf16",
        read=read,
        arch=arch,
    )


def fold_shape(layout: Layout, tile: Tile, arch: int = 0) -> Shape:
    """The compile-time record of a fold.

    Its parts have 32 columns where it walks: sums over a row must not depend on the tile that a format has, or a
    checkpoint would depend on its copy (I6). Else eight of a plain format, as products have them, or ``tile.k``.
    """
    half = formats.plane("nvfp4", layout.state_dim)
    whole = triton.next_power_of_2(half)
    if walks(layout):
        columns = min(32, max(16, whole // 2))
    else:
        columns = 8 if formats.is_plain(layout.precision.checkpoint_format.name) else min(tile.k, whole)
    shape = make_shape(layout, tile, "linear", False, False, tokens=1, arch=arch)
    return replace(shape, BE=16 if layout.window <= 16 else 32, BK=columns, C=2 * triton.cdiv(half, columns))


def copy_shape(layout: Layout, shape: Shape) -> Shape:
    """The shape of a fold as it writes a read copy: a plane a part.

    Triton gives loads and stores of one shape one layout, by the narrowest elements among them. Tiles of another shape
    keep a copy's layout from the sums over a row of a fold that walks, whose last bits would depend on it.
    """
    whole = triton.next_power_of_2(formats.plane("nvfp4", layout.state_dim))
    return replace(shape, BK=2 * whole if walks(layout) and whole == shape.BK else whole, C=2)


@functools.cache
def _capability(device: torch.device) -> int:
    """See ``Shape.arch``."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _expect_supported(layout: Layout, device: torch.device) -> None:
    wanted: list[tuple[str, Any, Callable[[Any], bool], str]] = [
        ("max_draft", layout.max_draft, lambda n: n <= MAX_DRAFT, f"1…{MAX_DRAFT}"),
        ("window", layout.window, lambda n: n <= MAX_WINDOW, f"1…{MAX_WINDOW}"),
        ("state_dim", layout.state_dim, lambda n: n <= 256, "1…256"),
        ("dtype", layout.dtype, lambda t: t in ELEMENT, "float32, bfloat16, float16"),
    ]
    for name, value, fits, supported in wanted:
        if not fits(value):
            raise ReplayError(f"{name}: got {value}, the kernels for {device} support {supported}")


def _bytes(tensor: Tensor) -> Tensor:
    """Codes of eight bits as bytes, whose type every GPU knows."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _layer_args(tensors: dict[str, Tensor], layout: Layout, index: int) -> tuple[Layer, Layer]:
    """Pointers and slot strides of a layer as the step takes them."""
    for name, tensor in tensors.items():
        if not tensor[0].is_contiguous():
            raise ReplayError(
                f"views[{index}][{name!r}]: each slot must be contiguous on {tensor.device}, got strides "
                f"{tensor.stride()}"
            )
        # Block scales are loaded four at once where a row has a multiple of eight.
        words = name.endswith("_scale") and tensor.itemsize == 1 and tensor.shape[-1] % 8 == 0
        if words and (tensor.data_ptr() % 4 or tensor.stride(0) % 4):
            raise ReplayError(f"views[{index}][{name!r}]: slots must start at multiples of 4 bytes on {tensor.device}")
    found: dict[str, Tensor | None] = {name: _bytes(tensor) for name, tensor in tensors.items()}
    read = "checkpoint" if layout.precision.read_copy is None else "read_copy"
    for name, suffix in (("state", ""), ("scale", "_scale"), ("head_scale", "_head_scale")):
        found[name] = found.get(read + suffix)
    found["channels" if layout.recurrence.decay == "channel" else "decay"] = found.pop("decay", None)
    pointers = Layer(*(found.get(name) for name in Layer._fields))
    return pointers, Layer(*(0 if t is None else t.stride(0) for t in pointers))


def _address_line(tensors: dict[str, Tensor], layout: Layout) -> list[list[int]]:
    """Address and bytes between slots of a layer's tensors, by column."""
    named: dict[str, Tensor | None] = dict(tensors)
    named["channels" if layout.recurrence.decay == "channel" else "decay"] = named.pop("decay", None)
    named["target"], named["copy"] = tensors["checkpoint"], tensors.get("read_copy")
    line = []
    for name in COLUMNS:
        tensor = named.get(name)
        line.append([0, 0] if tensor is None else [tensor.data_ptr(), tensor.stride(0) * tensor.itemsize])
    return line


def _types(layout: Layout, addresses: Tensor) -> Types:
    specs, policy = layout.tensors, layout.precision
    align = 16
    while align > 1 and bool((addresses[:, : COLUMNS.index("checkpoint_scale")] % align != 0).any()):
        align //= 2
    kept = [form.name for form in (policy.checkpoint_format, policy.read_format) if form is not None]
    decay = layout.recurrence.decay
    return Types(
        act=ELEMENT[layout.dtype],
        state=kept[0],
        target=kept[0],
        copy=kept[1] if len(kept) > 1 else None,
        written=ELEMENT[specs["written"].dtype] if "written" in specs else None,
        decay=decay == "head",
        channels=decay == "channel",
        key_scale="key_scale" in specs,
        written_scale="written_scale" in specs,
        written_low="written_low" in specs,
        stochastic=policy.rounding == "stochastic",
        align=align,
    )
