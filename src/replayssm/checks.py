"""Every rule about what a caller may pass, and the one error.

Rules are checked before anything is written; a message names the argument in the caller's words, what was
expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from replayssm.layout import Layout


_FAR = 2**31 - 1


class ReplayError(ValueError):
    """The caller passed something that the library cannot accept. Nothing was written."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ReplayError(f"{name}: got {value!r}, supported: {', '.join(repr(a) for a in allowed)}")


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int; raise unless it is an integer in ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ReplayError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"{low}…{high}"
        raise ReplayError(f"{name}: expected {limits}, got {value}")
    return value


def shape(name: str, tensor: object, dims: Sequence[tuple[str, int | None]], layout: Layout) -> None:
    """Raise unless ``tensor`` is a tensor of these dimensions.

    Args:
        name: the argument as the caller wrote it.
        tensor: what the caller passed.
        dims: ``(label, size)`` for each dimension; a size of None accepts any.
        layout: named in the message.
    """
    if not isinstance(tensor, Tensor):
        raise ReplayError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    fits = tensor.ndim == len(dims) and all(
        size in (None, got) for (_, size), got in zip(dims, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(label if size is None else f"{label}={size}" for label, size in dims)
        raise ReplayError(f"{name}: expected [{wanted}], got {list(tensor.shape)} ({layout.recurrence.title} layout)")


def dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise unless the tensor has one of the dtypes."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(dict.fromkeys(dtype_name(a) for a in allowed))
        raise ReplayError(f"{name}: expected {wanted}, got {dtype_name(tensor.dtype)}")


def device(name: str, tensor: Tensor, wanted: torch.device) -> None:
    """Raise unless the tensor is on the cache's device."""
    if tensor.device != wanted:
        raise ReplayError(f"{name}: expected a tensor on {wanted} (where the cache is), got one on {tensor.device}")


def int_vector(name: str, values: object, target: torch.device) -> Tensor:
    """Return ``values`` (a tensor or a sequence of ints) as an int32 vector on ``target``."""
    if isinstance(values, Tensor):
        if values.dtype not in (torch.int32, torch.int64):
            raise ReplayError(f"{name}: expected int32 or int64, got {dtype_name(values.dtype)}")
        vector = values
    elif isinstance(values, Sequence) and all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        # Beyond int32 is beyond everything that is counted here: it stays out of range instead of wrapping round.
        vector = torch.tensor([min(max(v, -_FAR), _FAR) for v in values], dtype=torch.int64)
    else:
        raise ReplayError(f"{name}: expected a tensor or a sequence of integers, got {type(values).__name__}")
    if vector.ndim != 1:
        raise ReplayError(f"{name}: expected one dimension [R], got {list(vector.shape)}")
    if vector.dtype == torch.int64:
        vector = vector.clamp(-_FAR, _FAR)
    return vector.to(device=target, dtype=torch.int32)


def slots(name: str, values: Sequence[int], total: int, *, unique: bool = True, padding: bool = True) -> None:
    """Raise unless each slot is in ``0…total-1`` (or −1, padding) and, if ``unique``, comes once."""
    seen: set[int] = set()
    for row, slot in enumerate(values):
        if slot == -1 and padding:
            continue
        if not 0 <= slot < total:
            extra = " (or -1 for padding)" if padding else ""
            raise ReplayError(f"{name}: row {row} has slot {slot}, expected 0…{total - 1}{extra}")
        if unique and slot in seen:
            raise ReplayError(f"{name}: slot {slot} comes twice in the batch (again at row {row})")
        seen.add(slot)


def offsets(values: Sequence[int], rows: int) -> None:
    """Raise unless the offsets start at 0, never fall and number one more than the rows."""
    if len(values) != rows + 1:
        raise ReplayError(f"offsets: expected rows + 1 = {rows + 1} entries, got {len(values)}")
    if values[0] != 0:
        raise ReplayError(f"offsets: expected to start at 0, got {values[0]}")
    for row in range(rows):
        if values[row + 1] < values[row]:
            raise ReplayError(f"offsets: must not fall, but row {row} runs from {values[row]} to {values[row + 1]}")


def draft_counts(counts: Sequence[int], max_draft: int) -> None:
    """Raise if a row brings more tokens than the layout's ``max_draft``."""
    for row, count in enumerate(counts):
        if count > max_draft:
            raise ReplayError(
                f"rows: row {row} brings {count} tokens, but the layout has max_draft={max_draft}; "
                f"raise max_draft or draft fewer"
            )


def parents(values: Sequence[int], row_offsets: Sequence[int]) -> None:
    """Raise unless each token's parent is −1 or an earlier token of the same row (row-local numbers)."""
    for row in range(len(row_offsets) - 1):
        for position, token in enumerate(range(row_offsets[row], row_offsets[row + 1])):
            if not -1 <= values[token] < position:
                raise ReplayError(
                    f"parents: token {position} of row {row} has parent {values[token]}, expected -1 (the root) "
                    f"or an earlier token 0…{position - 1} of its row"
                )


def accepted(values: Sequence[int], counts: Sequence[int]) -> None:
    """Raise unless each row accepts between 0 and as many tokens as it drafted."""
    if len(values) != len(counts):
        raise ReplayError(f"accepted: expected one entry a row ({len(counts)}), got {len(values)}")
    for row, (value, count) in enumerate(zip(values, counts, strict=True)):
        if not 0 <= value <= count:
            raise ReplayError(f"accepted: row {row} accepts {value} of {count} drafted tokens, expected 0…{count}")


def path(
    values: Sequence[Sequence[int]],
    taken: Sequence[int],
    row_offsets: Sequence[int],
    tree: Sequence[int] | None,
    *,
    given: bool,
) -> None:
    """Raise unless each row's path names its accepted tokens, each the child of the one before, from the root.

    ``given`` says whether the caller passed the path or left it out (then it is the row's first tokens).
    """
    if len(values) != len(taken):
        raise ReplayError(f"path: expected one line a row ({len(taken)}), got {len(values)}")
    for row, (line, count) in enumerate(zip(values, taken, strict=True)):
        if len(line) < count or any(token != -1 for token in line[count:]):
            raise ReplayError(
                f"path: row {row} accepts {count} tokens, expected as many entries and then -1, got {list(line)}"
            )
        drafted = row_offsets[row + 1] - row_offsets[row]
        before = -1
        for token in line[:count]:
            if not 0 <= token < drafted:
                raise ReplayError(f"path: row {row} names token {token}, expected 0…{drafted - 1}")
            parent = token - 1 if tree is None else tree[row_offsets[row] + token]
            if parent != before:
                hint = "" if given else f"; row {row} is a tree and accepts {count} tokens: pass path="
                raise ReplayError(
                    f"path: in row {row}, token {token} does not follow token {before} (its parent is {parent}){hint}"
                )
            before = token
