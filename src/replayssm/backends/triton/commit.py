"""The commit: decision and bookkeeping on the device, in one small program; drafts on a tree's path moved together.

The kernel leaves the work list of the fold behind: which slots, how many entries. The host never waits.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.fold import tensor_of
from replayssm.backends.triton.step import BAD_COUNT, BAD_OFFSETS, BAD_SLOT, report

BAD_ACCEPTED = tl.constexpr(7)
BAD_TWICE = tl.constexpr(8)
BAD_PATH = tl.constexpr(9)
BAD_UNSTEPPED = tl.constexpr(10)
# What ``owner`` holds between commits: no row.
NOBODY = tl.constexpr(2147483647)


@triton.jit
def path_fault(path, path_width, parents, row, start, count, taken, live, T: tl.constexpr):
    """Whether a row's path is not a line of drafts from the root, each the child of the one before, then −1s."""
    bad = taken < 0
    before = tl.zeros_like(taken) - 1
    for i in tl.static_range(T):
        step = tl.load(path + row * path_width + i, mask=live & (i < path_width), other=-1)
        used = i < taken
        known = (step >= 0) & (step < count)
        if parents is None:
            parent = step - 1
        else:
            parent = tl.load(parents + start + step, mask=live & known, other=-2)
        bad = bad | (used & (~known | (parent != before))) | (~used & (step != -1))
        before = step
    return bad


@triton.jit
def tree_fault(parents, start, taken, live, T: tl.constexpr):
    """Whether a tree row without a path accepts tokens that are no chain from the root."""
    bad = taken < 0
    if parents is not None:
        for i in tl.static_range(T):
            parent = tl.load(parents + start + i, mask=live & (i < taken), other=i - 1)
            bad = bad | (parent != i - 1)
    return bad


@triton.jit
def load_rows(batch, accepted, row, rows, slots, tokens, T: tl.constexpr):
    """A block of rows: slot, first token, tokens, accepted, and what is wrong with their numbers.

    Without ``accepted`` the rows bring nothing: their slots are folded.
    """
    there = row < rows
    slot = tl.load(batch.slots + row, mask=there, other=-1)
    outside = (slot < -1) | (slot >= slots)
    if accepted is None:
        nothing = tl.zeros_like(slot)
        return slot, nothing, nothing, nothing, tl.where(outside, BAD_SLOT, 0)
    else:
        start = tl.load(batch.offsets + row, mask=there, other=0)
        count = tl.load(batch.offsets + row + 1, mask=there, other=0) - start
        taken = tl.load(accepted + row, mask=there, other=0)
        code = tl.where((taken < 0) | (taken > count), BAD_ACCEPTED, 0)
        code = tl.where(count > T, BAD_COUNT, code)
        code = tl.where((count < 0) | (start < 0) | (start + count > tokens), BAD_OFFSETS, code)
        return slot, start, count, taken, tl.where(outside, BAD_SLOT, code)


@triton.jit(do_not_specialize=["path_width", "rows", "slots", "tokens"])
def commit_kernel(
    batch,
    books,
    accepted,
    path,
    path_width,
    work,
    moves,
    amount,
    rows,
    slots,
    tokens,
    BOOKS: tl.constexpr,
    RING: tl.constexpr,
    T: tl.constexpr,
    ROOM: tl.constexpr,
    BR: tl.constexpr,
    BL: tl.constexpr,
):
    """One program for all rows. Leaves the fold's work list, and in ``moves`` what a tree's compaction needs.

    ``work`` int32 [4, rows]: see ``fold_kernel``. ``moves`` int32 [3, rows]: entries and the convolution's place
    before this commit, and how many drafts were accepted (0 for a bad or padding row). ``BOOKS`` counts the lines of
    ``drafts``; without ``accepted`` every slot of the batch that has entries is folded.
    """
    r = tl.arange(0, BR)
    for block in range(0, rows, BR):
        row = block + r
        slot, start, count, taken, code = load_rows(batch, accepted, row, rows, slots, tokens, T)
        tl.atomic_min(books.owner + slot, row, mask=(code == 0) & (slot >= 0))
    tl.debug_barrier()
    folded = 0
    for block in range(0, rows, BR):
        row = block + r
        slot, start, count, taken, code = load_rows(batch, accepted, row, rows, slots, tokens, T)
        live = (code == 0) & (slot >= 0)
        owner = tl.load(books.owner + slot, mask=live, other=0, volatile=True)
        if path is None:
            fault = tree_fault(batch.parents, start, taken, live, T)
        else:
            fault = path_fault(path, path_width, batch.parents, row, start, count, taken, live, T)
        line = tl.arange(0, BL)
        book = books.drafts + line[None, :] * slots + slot[:, None]
        each = (line < BOOKS)[None, :] & live[:, None]
        pending = tl.load(book, mask=each, other=0)
        stale = tl.max((each & (pending != count[:, None])).to(tl.int32), 1) > 0
        code = tl.where(live & (taken > 0) & stale, BAD_UNSTEPPED, code)
        code = tl.where(live & fault, BAD_PATH, code)
        code = tl.where(live & (owner != row), BAD_TWICE, code)
        worst = tl.max(tl.where(code > 0, code * 4194304 + 4194303 - row, 0), 0)
        if worst > 0:
            report(books.error, worst // 4194304, 4194303 - worst % 4194304, 0)
        live = live & (code == 0)
        length = tl.load(books.length + slot, mask=live, other=0)
        folds = tl.load(books.folds + slot, mask=live, other=0)
        after = length + taken
        if accepted is None:
            full = live & (length > 0)
        else:
            full = live & (after > tl.load(books.limit + slot, mask=live, other=0))
        place = folded + tl.cumsum(full.to(tl.int32), 0) - 1
        folded += tl.sum(full.to(tl.int32), 0)
        tl.store(work + place, slot, mask=full)
        tl.store(work + rows + place, after, mask=full)
        tl.store(work + 2 * rows + place, slot, mask=full)
        tl.store(work + 3 * rows + place, folds + 1, mask=full)
        tl.store(books.length + slot, tl.where(full, 0, after), mask=live)
        tl.store(books.folds + slot, folds + 1, mask=full)
        tl.store(books.limit + slot, tl.zeros_like(slot) + ROOM, mask=full)
        tl.store(book, tl.zeros_like(pending), mask=each & live[:, None])
        tl.store(moves + row, length, mask=row < rows)
        tl.store(moves + rows + row, tl.where(live, taken, 0), mask=row < rows)
        if RING > 0:
            position = tl.load(books.position + slot, mask=live, other=0)
            tl.store(moves + 2 * rows + row, position, mask=row < rows)
            tl.store(books.position + slot, (position + taken) % RING, mask=live)
    tl.store(amount, folded)
    tl.debug_barrier()
    for block in range(0, rows, BR):
        row = block + r
        slot = tl.load(batch.slots + row, mask=row < rows, other=-1)
        tl.store(books.owner + slot, tl.zeros_like(slot) + NOBODY, mask=(slot >= 0) & (slot < slots))


@triton.jit
def move(base, source, goal, live, width: tl.constexpr, BW: tl.constexpr):
    """Copy rows ``source`` of a [·, width] array to rows ``goal``; all are read before any is written."""
    column = tl.arange(0, BW)[None, :]
    mask = live[:, None] & (column < width)
    rows = tl.load(base + source[:, None] * width + column, mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(base + goal[:, None] * width + column, rows, mask=mask)


@triton.jit
def compact_kernel(
    table,
    slots_ptr,
    path,
    path_width,
    moves,
    rows,
    layers,
    S: tl.constexpr,
    TYPES: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
):
    """Move a tree's accepted drafts to where a chain would have them. Grid: rows × layers × heads."""
    pid = tl.program_id(0)
    row = pid // (layers * S.H)
    layer = (pid // S.H) % layers
    head = pid % S.H
    taken = tl.load(moves + rows + row)
    if taken == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(moves + row)
    i = tl.arange(0, BT)
    live = i < taken
    source = length + tl.load(path + row * path_width + i, mask=live, other=0)
    goal = length + i
    ACT: tl.constexpr = TYPES.act
    WRITTEN: tl.constexpr = TYPES.written
    P: tl.constexpr = S.P
    K: tl.constexpr = S.K
    move(tensor_of(table, layer, 2, slot, ACT, TYPES) + head * S.W * S.P, source, goal, live, P, BP)
    move(tensor_of(table, layer, 3, slot, tl.float32, TYPES) + head * S.W, source, goal, live, 1, 1)
    if TYPES.decay:
        move(tensor_of(table, layer, 4, slot, tl.float32, TYPES) + head * S.W, source, goal, live, 1, 1)
    if TYPES.channels:
        move(tensor_of(table, layer, 5, slot, tl.float32, TYPES) + head * S.W * S.K, source, goal, live, K, BK)
    if WRITTEN is not None:
        move(tensor_of(table, layer, 7, slot, WRITTEN, TYPES) + head * S.W * S.P, source, goal, live, P, BP)
    if TYPES.written_scale:
        move(tensor_of(table, layer, 14, slot, tl.float32, TYPES) + head * S.W, source, goal, live, 1, 1)
    if TYPES.written_low:
        move(tensor_of(table, layer, 15, slot, WRITTEN, TYPES) + head * S.W * S.P, source, goal, live, P, BP)
    if head % (S.H // S.G) == 0:
        group = head // (S.H // S.G)
        move(tensor_of(table, layer, 1, slot, ACT, TYPES) + group * S.W * S.K, source, goal, live, K, BK)
        if TYPES.key_scale:
            move(tensor_of(table, layer, 6, slot, tl.float32, TYPES) + group * S.W, source, goal, live, 1, 1)
