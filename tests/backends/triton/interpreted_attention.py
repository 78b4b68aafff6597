"""Attention over slots through Triton's interpreter, against a softmax in float64; dead places hold NaN."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import support.interpreting  # noqa: F401
from replayssm.backends.triton.attention import Table, attend, keep, write

SLOTS, PLACES = 5, 160
TREE = [-1, 0, 0, 1, 1, 3]
# slot, committed tokens, parents of the new ones; a padding row among them, another one behind
ROWS = [(3, 70, [-1, 0, 1]), (-1, 0, []), (0, 0, [-1]), (4, 130, TREE), (1, 63, [-1, 0]), (-1, 0, [])]
TAIL = 3


def table_of() -> Table:
    slots, offsets, lengths = [], [0], []
    homes, places, positions, lines = [], [], [], []
    for slot, length, parents in ROWS:
        slots.append(slot)
        lengths.append(length)
        offsets.append(offsets[-1] + len(parents))
        depth: list[int] = []
        bits: list[int] = []
        for token, parent in enumerate(parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            bits.append((0 if parent < 0 else bits[parent]) | 1 << token)
            homes.append(slot)
            places.append(length + token)
            positions.append(length + depth[token])
        lines += bits
    pad = [0] * TAIL
    columns = (slots, offsets, lengths, homes + [-1] * TAIL, places + pad, positions + pad, lines + pad)
    return Table(*(torch.tensor(column, dtype=torch.int32) for column in columns))


def naive(query: Tensor, keys: Tensor, values: Tensor, table: Table, scaling: float, window: int | None) -> Tensor:
    heads, tokens = query.shape[1:3]
    share = heads // keys.shape[1]
    out = torch.zeros(tokens, heads, values.shape[3], dtype=torch.float64)
    for (slot, length, parents), start in zip(ROWS, table.offsets.tolist(), strict=False):
        for token in range(len(parents)):
            path, at = [], token
            while at >= 0:
                path.append(length + at)
                at = parents[at]
            seen = [*range(length), *reversed(path)]
            seen = seen[-window:] if window else seen
            for head in range(heads):
                k, v = (x[slot, head // share, seen].double() for x in (keys, values))
                weights = (k @ query[0, head, start + token].double() * scaling).softmax(0)
                out[start + token, head] = weights @ v
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "groups", "width", "wide"), [(6, 2, 24, 8), (4, 4, 16, 40), (8, 1, 80, 16)])
def test_rows_of_every_length(heads: int, groups: int, width: int, wide: int, splits: int, window: int | None) -> None:
    torch.manual_seed(0)
    table = table_of()
    tokens = len(table.homes)
    keys, values = torch.randn(SLOTS, groups, PLACES, width), torch.randn(SLOTS, groups, PLACES, wide)
    for slot in range(SLOTS):
        length = next((length for home, length, _ in ROWS if home == slot), 0)
        keys[slot, :, length:] = values[slot, :, length:] = torch.nan
    before = keys.clone(), values.clone()
    # As a model hands them over: a transposed view of a projection.
    query = torch.randn(1, tokens, heads, width).transpose(1, 2)
    new = torch.randn(1, tokens, groups, width).transpose(1, 2), torch.randn(1, tokens, groups, wide).transpose(1, 2)
    write(keys, values, *new, table)
    for whole, old, fresh in zip((keys, values), before, new, strict=True):
        for token, (slot, place) in enumerate(zip(table.homes.tolist(), table.places.tolist(), strict=True)):
            if slot >= 0:
                assert torch.equal(whole[slot, :, place], fresh[0, :, token])
                old[slot, :, place] = fresh[0, :, token]
        torch.testing.assert_close(whole, old, rtol=0, atol=0, equal_nan=True)
    got = attend(query, keys, values, table, 6, 0.3, window, splits)
    torch.testing.assert_close(got.double(), naive(query, keys, values, table, 0.3, window), rtol=1e-5, atol=1e-5)
    assert bool((got[-TAIL:] == 0).all())


def test_a_tree_keeps_its_path() -> None:
    table = table_of()
    keys, values = torch.randn(SLOTS, 2, PLACES, 8), torch.randn(SLOTS, 2, PLACES, 20)
    wanted = keys.clone(), values.clone()
    path = torch.full((len(ROWS), 6), -1, dtype=torch.int32)
    path[3, :3] = torch.tensor([0, 1, 4])
    path[0, :2] = torch.tensor([0, 1])
    accepted = torch.tensor([2, 0, 0, 3, 0, 0], dtype=torch.int32)
    for tensor in wanted:
        tensor[4, :, 130:133] = tensor[4, :, [130, 131, 134]]
    keep(keys, values, table, path, accepted)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])
    assert all(
        b - a == len(parents) for (a, b), (_, _, parents) in zip(pairwise(table.offsets.tolist()), ROWS, strict=True)
    )
