"""What the drafters propose, against a naive search; how long drafts get."""

from hypothesis import given
from hypothesis import strategies as st

from replayssm.engine import Ask, Params, Point, PromptLookup, SuffixLookup
from replayssm.engine.adapt import PATIENCE, Acceptance

POINT = Point(Params(), 0, 0)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def ask(tokens, depth=4, limit=8):
    return Ask("a", tokens, depth, limit, POINT)


@given(TEXT, st.integers(1, 39))
def test_ngrams_follow_the_newest_occurrence(text, cut):
    drafter = PromptLookup(ngram=3)
    drafter.propose([ask(text[:cut])])  # the index grows with the text
    wanted = []
    for size in (3, 2, 1):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[len(text) - size :]]
        if ends and size <= len(text):
            wanted = text[ends[-1] : ends[-1] + 4]
            break
    assert drafter.propose([ask(text)])[0].tokens == wanted


@given(TEXT, st.integers(1, 39))
def test_suffixes_follow_the_longest_match(text, cut):
    drafter = SuffixLookup(least=1, factor=9.0)
    drafter.propose([ask(text[:cut])])
    wanted = []
    for size in range(len(text) - 1, 0, -1):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[len(text) - size :]]
        if ends:
            wanted = text[ends[0] : ends[0] + 4]
            break
    assert drafter.propose([ask(text)])[0].tokens == wanted


def test_branches_are_different_continuations():
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 9, 1, 2]
    draft = PromptLookup(ngram=2, branches=2).propose([ask(text, depth=2)])[0]
    assert (draft.tokens, draft.parents) == ([4, 9, 3, 9], [-1, 0, -1, 2])


def test_weak_matches_draft_little():
    text = [5, 6, 7, 8, 9, 1, 5, 6]
    assert SuffixLookup(least=2, factor=1.0).propose([ask(text)])[0].tokens == [7, 8]
    assert SuffixLookup(least=3).propose([ask(text)])[0].tokens == []


def test_forgotten_sequences_leave_nothing():
    for drafter in (PromptLookup(), SuffixLookup()):
        drafter.propose([ask([1, 2, 1])])
        drafter.forget("a")
        drafter.forget("a")
        assert not any(isinstance(v, dict) and v for v in vars(drafter).values())


def test_depth_follows_acceptance():
    always, never, half = Acceptance(), Acceptance(), Acceptance()
    assert always.depth(8, 0.2) == 8
    for step in range(40):
        always.note(7, 7)
        depth = never.depth(8, 0.2)
        assert step < 10 or depth <= 1
        never.note(0, depth)
        half.note(step % 2, 1)
    assert always.depth(8, 0.2) == 8
    assert 1 <= half.depth(8, 0.2) <= 3
    waits = [never.depth(8, 0.2)]
    while waits[-1] == 0:
        never.note(0, 0)
        waits.append(never.depth(8, 0.2))
    assert len(waits) <= PATIENCE + 1  # it looks again
    never.note(1, 1)
    for _ in range(12):
        never.note((d := never.depth(8, 0.2)), d)
    assert never.depth(8, 0.2) > 2
    assert half.depth(8, 0.6) < half.depth(8, 0.2)
    assert Acceptance().depth(0, 0.2) == 0
