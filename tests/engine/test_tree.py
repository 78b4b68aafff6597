"""Drafts: merging, depth, and the way that the target goes."""

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
