"""Drafts: merging, depth, and the way that the target goes."""

import pytest

from replayssm import ReplayError
from replayssm.engine import Draft


def test_chains():
    draft = Draft.chain([7, 8, 9])
    assert (draft.parents, draft.depth, draft.row_parents) == ([-1, 0, 1], 3, None)
    assert draft.follow([7, 8, 1, 5]) == ([0, 1, 2], [7, 8, 1])
    assert draft.follow([3, 8, 9, 5]) == ([0], [3])
    assert draft.follow([7, 8, 9, 5]) == ([0, 1, 2, 3], [7, 8, 9, 5])
    assert Draft().follow([4]) == ([0], [4])
    assert (Draft().depth, Draft().row_parents) == (0, None)


def test_merged_chains_share_their_beginning():
    draft = Draft.merged([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]], 10)
    assert (draft.tokens, draft.parents) == ([1, 2, 3, 4, 5], [-1, 0, 1, 1, -1])
    assert (draft.depth, draft.row_parents, draft.path(3)) == (3, [-1, 0, 1, 2, 2, 0], [1, 2, 4])
    assert draft.follow([5, 0, 0, 0, 0, 9]) == ([0, 5], [5, 9])
    assert draft.follow([1, 2, 4, 0, 8, 0]) == ([0, 1, 2, 4], [1, 2, 4, 8])
    assert Draft.merged([[1, 2, 3], [4]], 2).tokens == [1, 2]


@pytest.mark.parametrize(
    ("draft", "match"),
    [
        (Draft([1, 2], [-1]), "2 tokens, but 1 parents"),
        (Draft.chain([1, 2, 3, 4]), "at most 3 tokens and proposed 4"),
        (Draft.chain([1, 9]), "0…8, got 9"),
        (Draft([1, 2], [1, -1]), "parents come before children"),
    ],
)
def test_what_a_drafter_may_not_propose(draft, match):
    with pytest.raises(ReplayError, match=match):
        draft.check(3, 9)
    Draft.chain([1, 2, 8]).check(3, 9)
