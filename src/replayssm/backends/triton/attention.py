"""Attention of a row's new tokens over its slot of a cache: decode and verify, with fixed shapes and addresses.

A program takes the queries of one row that share a key head, and a part of the row's keys; where rows alone do not
fill the GPU, the parts of a row are put together afterwards (flash decoding). Every row has its own length. Among new
tokens a query sees itself and its ancestors, which it is given as bits.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.triton.launch import _processors

# Programs a multiprocessor that attention should have at least, if the keys are long enough to be cut.
PROGRAMS = 4


class Store(NamedTuple):
    """Keys or values of all slots [slots, heads, places, dim]: pointer and strides; that of dim is 1."""

    data: Any
    slot: Any
    head: Any
    place: Any


class Fresh(NamedTuple):
    """Queries, keys or values of N new tokens [heads, N, dim]: pointer and strides; that of dim is 1."""

    data: Any
    head: Any
    token: Any


class Table(NamedTuple):
    """Which tokens are whose, all int32 on the device.

    Attributes:
        slots, offsets, lengths: of R rows: slot (−1: padding), first token [R + 1], committed tokens of the slot.
        homes, places: of N tokens: slot (−1: padding) and place in it.
        positions: of N tokens, in their sequences: the place, or less where drafts branch.
        lines: of N tokens: bit j is set if token j of the row is this one or above it.
    """

    slots: Any
    offsets: Any
    lengths: Any
    homes: Any
    places: Any
    positions: Any
    lines: Any


@dataclass(frozen=True)
class Sizes:
    """Compile-time numbers of a launch.

    Attributes:
        H, share, T: heads, heads of one key head, most tokens a row.
        D, V: widths of a key and of a value.
        BM, BN: queries and keys of a tile; BD, BV: widths rounded up to powers of two.
        splits: parts of a row's keys.
        window: how many tokens a query sees; 0: all.
    """

    H: int
    share: int
    T: int
    D: int
    V: int
    BM: int
    BN: int
    BD: int
    BV: int
    splits: int
    window: int


@triton.jit
def put(store, new, slot, place, token, G: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr):
    """Copy one token's heads into its slot."""
    g = tl.arange(0, BG).to(tl.int64)
    d = tl.arange(0, BD)
    mask = (g < G)[:, None] & (d < D)[None, :]
    x = tl.load(new.data + (g * new.head + token * new.token)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(
        store.data + (slot * store.slot + g * store.head + place * store.place)[:, None] + d[None, :], x, mask=mask
    )


@triton.jit
def write_kernel(
    keys, values, new_keys, new_values, table,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(table.homes + token).to(tl.int64)
    if slot >= 0:
        place = tl.load(table.places + token).to(tl.int64)
        put(keys, new_keys, slot, place, token, G, D, BG, BD)
        put(values, new_values, slot, place, token, G, V, BG, BV)


@triton.jit(do_not_specialize=["tokens"])
def attention_kernel(query, keys, values, table, out, parts, sums, tokens, scale, S: tl.constexpr):
    """Grid: rows × key heads × tiles of queries, splits.

    ``out`` [N, H, V]. With several splits, ``parts`` [splits, N, H, V] and ``sums`` [2, splits, N, H] float32 are
    written instead: averages of the part's values, the largest score (in powers of two) and the sum of weights.
    """
    tiles: tl.constexpr = (S.share * S.T + S.BM - 1) // S.BM
    groups: tl.constexpr = S.H // S.share
    pid = tl.program_id(0)
    split = tl.program_id(1)
    row = pid // (groups * tiles)
    group = (pid // tiles) % groups
    slot = tl.load(table.slots + row).to(tl.int64)
    start = tl.load(table.offsets + row)
    count = tl.load(table.offsets + row + 1) - start
    if (slot < 0) | (count <= 0):
        return
    length = tl.load(table.lengths + row)
    seen = length + count
    m = (pid % tiles) * S.BM + tl.arange(0, S.BM)
    t = m // S.share
    valid = (t < count) & (t < S.T)
    token = (start + t).to(tl.int64)
    head = group * S.share + m % S.share
    d = tl.arange(0, S.BD)
    v = tl.arange(0, S.BV)
    q = tl.load(
        query.data + (head * query.head + token * query.token)[:, None] + d[None, :],
        mask=valid[:, None] & (d < S.D)[None, :],
        other=0.0,
    )
    line = tl.load(table.lines + token, mask=valid, other=0)
    position = tl.load(table.positions + token, mask=valid, other=0)
    first = 0
    if S.window > 0:
        first = tl.maximum(length - S.window + 1, 0) // S.BN * S.BN
    each = tl.cdiv(tl.cdiv(seen - first, S.splits), S.BN) * S.BN
    begin = first + split * each
    end = tl.minimum(begin + each, seen)
    base_k = keys.data + slot * keys.slot + group.to(tl.int64) * keys.head
    base_v = values.data + slot * values.slot + group.to(tl.int64) * values.head
    most = tl.full([S.BM], float("-inf"), tl.float32)
    total = tl.full([S.BM], 0.0, tl.float32)
    sum_v = tl.full([S.BM, S.BV], 0.0, tl.float32)
    for at in range(begin, end, S.BN):
        n = at + tl.arange(0, S.BN)
        here = n < end
        far = n.to(tl.int64)
        k = tl.load(
            base_k + (far * keys.place)[None, :] + d[:, None], mask=here[None, :] & (d < S.D)[:, None], other=0.0
        )
        x = tl.load(
            base_v + (far * values.place)[:, None] + v[None, :], mask=here[:, None] & (v < S.V)[None, :], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        j = n - length
        above = (line[:, None] >> tl.minimum(tl.maximum(j, 0), 31)[None, :]) & 1
        sees = here[None, :] & ((j < 0)[None, :] | (above == 1))
        if S.window > 0:
            mine = (j >= 0) & (j < count)
            where = tl.where(mine, tl.load(table.positions + start + j, mask=mine, other=0), n)
            sees = sees & (position[:, None] - where[None, :] < S.window)
        scores = tl.where(sees, scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(most - safe)
        total = total * shrink + tl.sum(weights, 1)
        sum_v = sum_v * shrink[:, None] + tl.dot(weights.to(x.dtype), x, input_precision="ieee")
        most = top
    mean = sum_v / tl.where(total > 0, total, 1.0)[:, None]
    mask = valid[:, None] & (v < S.V)[None, :]
    place = token * S.H + head
    if S.splits == 1:
        tl.store(out + (place * S.V)[:, None] + v[None, :], mean.to(out.dtype.element_ty), mask=mask)
    else:
        place += tokens.to(tl.int64) * S.H * split
        tl.store(parts + (place * S.V)[:, None] + v[None, :], mean, mask=mask)
        tl.store(sums + place, most, mask=valid)
        tl.store(sums + tokens.to(tl.int64) * S.H * S.splits + place, total, mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def join_kernel(table, out, parts, sums, tokens, S: tl.constexpr, BS: tl.constexpr):
    """Put the parts of a token's head together. Grid: tokens × heads."""
    place = tl.program_id(0).to(tl.int64)
    if tl.load(table.homes + place // S.H) < 0:
        return
    apart = tokens.to(tl.int64) * S.H
    split = tl.arange(0, BS)
    inside = split < S.splits
    at = place + split * apart
    most = tl.load(sums + at, mask=inside, other=float("-inf"))
    weight = tl.load(sums + apart * S.splits + at, mask=inside, other=0.0) * tl.exp2(most - tl.max(most, 0))
    v = tl.arange(0, S.BV)
    mask = (inside & (weight > 0))[:, None] & (v < S.V)[None, :]
    x = tl.load(parts + (at * S.V)[:, None] + v[None, :], mask=mask, other=0.0)
    mean = tl.sum(x * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + place * S.V + v, mean.to(out.dtype.element_ty), mask=v < S.V)


@triton.jit
def shift(store, slot, head, source, goal, taken, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Move tokens of one head; all are read before any is written."""
    d = tl.arange(0, BD)
    mask = (tl.arange(0, BT) < taken)[:, None] & (d < D)[None, :]
    base = store.data + slot * store.slot + head.to(tl.int64) * store.head
    x = tl.load(base + (source * store.place)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(base + (goal * store.place)[:, None] + d[None, :], x, mask=mask)


@triton.jit
def keep_kernel(
    keys, values, table, path, accepted,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Move a tree's accepted tokens to where a chain would have them. ``path`` [R, T]. Grid: rows × key heads."""
    row = tl.program_id(0) // G
    head = tl.program_id(0) % G
    slot = tl.load(table.slots + row).to(tl.int64)
    if slot >= 0:
        taken = tl.load(accepted + row)
        length = tl.load(table.lengths + row).to(tl.int64)
        i = tl.arange(0, BT)
        source = length + tl.load(path + row * T + i, mask=i < taken, other=0)
        shift(keys, slot, head, source, length + i, taken, D, BT, BD)
        shift(values, slot, head, source, length + i, taken, V, BT, BV)


def store(tensor: Tensor) -> Store:
    """A cache [slots, heads, places, dim] as kernels take it."""
    return Store(tensor, *tensor.stride()[:3])


def fresh(tensor: Tensor) -> Fresh:
    """New tokens [1, heads, N, dim] as kernels take them."""
    tensor = tensor if tensor.stride(3) == 1 else tensor.contiguous()
    return Fresh(tensor, *tensor.stride()[1:3])


def write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, table: Table) -> None:
    """Put new keys and values [1, G, N, dim] into their slots; tokens without a home stay out."""
    _, heads, tokens, width = new_keys.shape
    tiles = [triton.next_power_of_2(size) for size in (heads, width, new_values.shape[3])]
    write_kernel[(tokens,)](
        store(keys), store(values), fresh(new_keys), fresh(new_values), table,
        heads, width, new_values.shape[3], *tiles,
    )  # fmt: skip


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Table,
    draft: int,
    scaling: float,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of every row.

    Args:
        query: [1, H, N, D].
        keys: [slots, G, places, D], the new ones written already; heads share key heads in order.
        values: [slots, G, places, V].
        table: of the rows; at most ``draft`` tokens a row, 31 at most.
        draft: see there.
        scaling: of the scores.
        window: how many tokens a query sees, itself included; None: all.
        splits: parts of a row's keys; None: as many as fill the GPU.

    Returns:
        [N, H, V]; zero for tokens without a row.
    """
    _, heads, tokens, width = query.shape
    rows, groups, wide = len(table.slots), keys.shape[1], values.shape[3]
    share = heads // groups
    most = min(64, max(16, triton.next_power_of_2(share * draft)))
    large = max(width, wide) * query.element_size() > 256
    block = 32 if large else 64
    programs = rows * groups * triton.cdiv(share * draft, most)
    fill = triton.cdiv(PROGRAMS * _processors(query.device), programs)
    parted = splits or max(1, min(fill, triton.cdiv(keys.shape[2], 2 * block), 64))
    sizes = Sizes(
        heads, share, draft, width, wide, most, block,
        *(max(16, triton.next_power_of_2(size)) for size in (width, wide)),
        parted, window or 0,
    )  # fmt: skip
    out = query.new_zeros((tokens, heads, wide))
    parts = sums = None
    if parted > 1:
        parts = query.new_empty((parted, tokens, heads, wide), dtype=torch.float32)
        sums = query.new_empty((2, parted, tokens, heads), dtype=torch.float32)
    attention_kernel[(programs, parted)](
        fresh(query), store(keys), store(values), table, out, parts, sums, tokens, scaling * 1.4426950408889634,
        S=sizes, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parted > 1:
        join_kernel[(tokens * heads,)](
            table, out, parts, sums, tokens, S=sizes, BS=triton.next_power_of_2(parted), num_warps=4
        )
    return out


def keep(keys: Tensor, values: Tensor, table: Table, path: Tensor, accepted: Tensor) -> None:
    """Move what a tree accepted: tokens ``path`` int32 [R, T] of each row, the first ``accepted`` int32 [R] of them."""
    rows, draft = path.shape
    _, heads, _, width = keys.shape
    wide = values.shape[3]
    keep_kernel[(rows * heads,)](
        store(keys), store(values), table, path, accepted, heads, width, wide, draft,
        *(triton.next_power_of_2(size) for size in (draft, width, wide)),
    )  # fmt: skip
