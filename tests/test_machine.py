"""Every verb in any order, against the list of what the sequences truly hold, for every recurrence.

Before each step every dead entry, and every input that no row owns, is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replayssm import ReplayCache, ReplayError, Rows, step
from support.makers import CORNERS, FLAVOURS, layout_of, random_inputs
from support.model import Model, conv_layout
from support.poison import changed, picture, poison

SLOTS = 4
SOME = st.lists(st.sampled_from(range(SLOTS)), unique=True, max_size=SLOTS)
# Rows: slots in any order, padding anywhere.
PADDED = SOME.flatmap(lambda s: st.integers(0, 1).flatmap(lambda n: st.permutations(s + [-1] * n)))


class Verbs(RuleBasedStateMachine):
    name = "gdn"
    layers = 1
    dtype = torch.float64

    @initialize(seed=st.integers(0, 2**16), window=st.sampled_from([4, 5, 9, 20]), draft=st.integers(1, 4))
    def allocate(self, seed: int, window: int, draft: int) -> None:
        layout = conv_layout(layout_of(self.name, self.dtype, window=window, max_draft=draft))
        self.model = Model(self.name, layout, self.layers, SLOTS, seed=seed)
        other = replace(layout, window=window % 9 + 3, max_draft=1 + draft % 3)
        self.other = ReplayCache.allocate(other, self.layers, 2 * SLOTS)

    @rule(slots=PADDED, phase=st.one_of(st.none(), st.integers(0, 40)))
    def load(self, slots: list[int], phase: int | None) -> None:
        self.model.load(slots, phase)

    @precondition(lambda self: self.model.draft is None)
    @rule(data=st.data(), slots=PADDED, tree=st.booleans(), extra=st.integers(0, 2))
    def step(self, data: st.DataObject, slots: list[int], tree: bool, extra: int) -> None:
        most = self.model.layout.max_draft
        counts = [data.draw(st.integers(0, most)) for _ in slots]
        parents = [data.draw(st.integers(-1, t - 1)) for n in counts for t in range(n)] if tree else None
        self.model.step(slots, counts, parents, extra)

    @precondition(lambda self: self.model.draft is not None)
    @rule()
    def repeat(self) -> None:
        self.model.again()

    @precondition(lambda self: self.model.draft is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        draft = self.model.draft
        assert draft is not None
        ends = []
        for slot, count in zip(draft.slots, draft.counts, strict=True):
            ends.append(-1 if slot in draft.dropped else data.draw(st.integers(-1, count - 1)))
        if draft.parents is None:
            self.model.commit([end + 1 for end in ends])
        else:
            self.model.commit([], ends)

    @precondition(lambda self: self.model.draft is not None)
    @rule()
    def commit_nothing(self) -> None:
        draft = self.model.draft
        assert draft is not None
        self.model.commit([0] * len(draft.slots))

    @precondition(lambda self: self.model.draft is not None and self.model.draft.dropped)
    @rule()
    def commit_what_is_gone(self) -> None:
        """Accepting drafts that a fold, load, fork or reset dropped raises."""
        draft = self.model.draft
        assert draft is not None
        accepted = [n if slot in draft.dropped else 0 for slot, n in zip(draft.slots, draft.counts, strict=True)]
        if any(accepted) and draft.parents is None:
            before = picture(self.model.cache)
            with pytest.raises(ReplayError, match="commit: row"):
                self.model.cache.commit(draft.rows, accepted)
            assert changed(before, picture(self.model.cache)) == []

    @rule(slots=PADDED)
    def fold(self, slots: list[int]) -> None:
        self.model.fold(slots)

    @rule(data=st.data(), dst=SOME)
    def fork(self, data: st.DataObject, dst: list[int]) -> None:
        """Any sources, the same one several times, overlapping the destinations."""
        self.model.fork([data.draw(st.sampled_from(range(SLOTS))) for _ in dst], dst)

    @rule(slots=PADDED)
    def reset(self, slots: list[int]) -> None:
        self.model.reset(slots)

    @rule(data=st.data(), slots=SOME, there=st.permutations(range(2 * SLOTS)))
    def travel(self, data: st.DataObject, slots: list[int], there: list[int]) -> None:
        """Out, into another cache with another window, and back into other slots."""
        model, places = self.model, there[: len(slots)]
        poison(self.other, 7.0)
        self.other.import_(places, model.cache.export(slots))
        back = data.draw(st.permutations(range(SLOTS)))[: len(slots)]
        model.cache.import_(back, self.other.export(places))
        truths = [model.truth[slot].copy() for slot in slots]
        for slot, truth in zip(back, truths, strict=True):
            model.truth[slot] = truth
        model.drop(back)

    @rule(slots=SOME, data=st.data())
    def restore(self, slots: list[int], data: st.DataObject) -> None:
        """Out and back into the same cache."""
        model = self.model
        back = data.draw(st.permutations(range(SLOTS)))[: len(slots)]
        model.cache.import_(back, model.cache.export(slots))
        truths = [model.truth[slot].copy() for slot in slots]
        for slot, truth in zip(back, truths, strict=True):
            model.truth[slot] = truth
        model.drop(back)

    @precondition(lambda self: self.model.draft is not None)
    @rule(more=st.integers(0, 1))
    def step_too_early(self, more: int) -> None:
        """Another number of tokens before the commit would lose drafts."""
        draft = self.model.draft
        assert draft is not None
        held = [(s, n) for s, n in zip(draft.slots, draft.counts, strict=True) if s >= 0 and s not in draft.dropped]
        held = [(slot, n) for slot, n in held if n and n != more]
        if held:
            rows = Rows.draft([held[0][0]], [more])
            inputs = random_inputs(self.name, self.model.layout, more, self.model.source)
            with pytest.raises(ReplayError, match="step: row 0"):
                step(self.model.cache[0], inputs, rows)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


@pytest.mark.parametrize("name", [*CORNERS, *FLAVOURS])
def test_any_order_of_verbs_equals_the_oracle(name: str) -> None:
    machine = type(name, (Verbs,), {"name": name, "layers": 2 if name == "kda" else 1})
    examples = 40 if name in CORNERS else 15
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25))


@pytest.mark.parametrize("name", [*CORNERS, *FLAVOURS])
def test_any_order_of_verbs_in_float32(name: str) -> None:
    """As above in the dtype that C and GPU kernels take."""
    machine = type(name, (Verbs,), {"name": name, "dtype": torch.float32})
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25))


def test_the_machine_sees_a_wrong_state() -> None:
    """The comparison itself: a state that is off by 1e-6 fails."""
    model = Model("gdn", layout_of("gdn"))
    model.load([0])
    model.cache.views()[0]["checkpoint"][0] += 1e-6
    with pytest.raises(AssertionError):
        model.check()
    assert torch.isfinite(model.cache.materialise(0, [0])).all()
