"""Rows: who owns which token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import ReplayError, Rows

COUNTS = st.lists(st.integers(0, 4), max_size=6)


def test_decode_gives_each_row_one_token() -> None:
    rows = Rows.decode([3, -1, 0])
    assert rows.slots.tolist() == [3, -1, 0]
    assert rows.offsets.tolist() == [0, 1, 2, 3]
    assert rows.parents is None


@given(COUNTS)
def test_draft_counts_up(counts: list[int]) -> None:
    rows = Rows.draft(range(len(counts)), counts)
    assert rows.offsets.tolist() == [sum(counts[:r]) for r in range(len(counts) + 1)]
    assert rows.host(9, 4).counts == counts


@pytest.mark.parametrize("kind", [list, tuple, lambda v: torch.tensor(v), lambda v: torch.tensor(v, dtype=torch.int32)])
def test_any_integers_become_int32(kind: Callable) -> None:
    rows = Rows.draft(kind([2, 0]), kind([1, 2]), kind([-1, -1, 0]))
    assert rows.parents is not None
    assert {t.dtype for t in (rows.slots, rows.offsets, rows.parents)} == {torch.int32}
    found = rows.host(3, 2)
    assert (found.slots, found.offsets, found.parents) == ([2, 0], [0, 1, 3], [-1, -1, 0])


def test_numbers_beyond_int32_do_not_wrap_into_range() -> None:
    for far in ([2**32 + 1], torch.tensor([2**32 + 1]), [2**80], [-(2**40)]):
        with pytest.raises(ReplayError, match=r"^slots: row 0 has slot -?2147483647, expected 0…3"):
            Rows.decode(far).host(4, 1)


def test_parents_of_tokens_past_the_last_offset_are_not_looked_at() -> None:
    assert Rows.draft([0], [2], [-1, 0, 77]).host(1, 2).parents == [-1, 0, 77]


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=5))
def test_a_parent_comes_before_its_child(parents: list[int]) -> None:
    rows = Rows.draft([0], [len(parents)], parents)
    if all(parent < token for token, parent in enumerate(parents)):
        assert rows.host(1, 5).parents == parents
    else:
        with pytest.raises(ReplayError, match=r"^parents: token \d of row 0"):
            rows.host(1, 5)


def test_padding_may_come_often_and_slots_once() -> None:
    assert Rows.decode([-1, 2, -1, 0]).host(3, 1).slots == [-1, 2, -1, 0]
    with pytest.raises(ReplayError, match=r"^slots: slot 2 comes twice in the batch \(again at row 2\)$"):
        Rows.decode([2, -1, 2]).host(3, 1)
