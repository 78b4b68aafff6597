"""I1 to I10 of the architecture, one test each, for every recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import Precision, ReplayCache, ReplayError, Rows, step
from replayssm.precision import encode
from support.caches import decode, started
from support.makers import CORNERS, EVERY, generator, layout_of, random_inputs, random_state, take
from support.model import Model
from support.poison import changed, live_parts, picture, poison, same

every = pytest.mark.parametrize("name", EVERY)
corners = pytest.mark.parametrize("name", CORNERS)


@every
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_i1_dead_entries_do_not_exist(name: str, junk: float) -> None:
    layout = layout_of(name)
    caches = [started(layout), started(layout)]
    source = [generator(3), generator(3)]
    for turn in range(8):
        outputs, states = [], []
        for cache, numbers, filling in zip(caches, source, (0.0, junk), strict=True):
            poison(cache, filling)
            states.append(cache.materialise(0, range(4)))
            rows = Rows.draft([2, 0, 3], [turn % 5, 4, 1])
            outputs.append(step(cache[0], random_inputs(name, layout, turn % 5 + 5, numbers), rows))
            cache.commit(rows, [turn % 5, 2, turn % 2])
        assert same(*outputs)
        assert same(*states)
        assert torch.isfinite(outputs[0]).all()


@every
@given(length=st.integers(0, 5), counts=st.lists(st.integers(0, 4), min_size=3, max_size=3), tree=st.booleans())
@settings(max_examples=10)
def test_i2_step_is_idempotent(name: str, length: int, counts: list[int], tree: bool) -> None:
    layout = layout_of(name)
    cache = started(layout, layers=2)
    decode(cache, name, length)
    poison(cache)
    before, alive = picture(cache), live_parts(cache, range(4))
    parents = [t // 2 - 1 for n in counts for t in range(n)] if tree else None
    rows = Rows.draft([3, 0, 2], counts, parents)
    inputs = random_inputs(name, layout, sum(counts), generator(9))
    first = step(cache[1], inputs, rows)
    once = picture(cache)
    assert set(changed(before, once)) <= {"_drafts"} | {f"1.{n}" for n, spec in layout.tensors.items() if spec.entries}
    assert changed(alive, live_parts(cache, range(4))) == []
    for _ in range(2):
        assert same(step(cache[1], inputs, rows), first)
        assert changed(once, picture(cache)) == []


@every
def test_i2_step_writes_its_own_entries_only(name: str) -> None:
    layout = layout_of(name)
    cache = started(layout)
    decode(cache, name, 3)
    poison(cache, 7.0)
    before = picture(cache)
    step(cache[0], random_inputs(name, layout, 2, generator(0)), Rows.draft([1], [2]))
    for key, tensor in picture(cache).items():
        if key.startswith("0.") and layout.tensors[key[2:]].entries:
            tensor[1][:, 3:5] = 7.0
            assert same(tensor, before[key])


@corners
def test_i3_only_five_verbs_write_length(name: str) -> None:
    layout = layout_of(name)
    cache = started(layout)
    decode(cache, name, 3)
    rows = Rows.draft([0, 1], [2, 4])
    step(cache[0], random_inputs(name, layout, 6, generator(0)), rows)
    cache.materialise(0, [0, 1])
    cache.export([0, 1])
    cache.views()
    assert cache.length.tolist() == [3, 3, 3, 3]
    cache.commit(rows, [2, 1])
    assert cache.length.tolist() == [5, 4, 3, 3]
    cache.fork([0], [3])
    assert cache.length.tolist() == [5, 4, 3, 5]
    cache.fold([0])
    cache.reset([1])
    cache.load(0, [2], random_state(layout, 1, generator(0)))
    assert cache.length.tolist() == [0, 0, 0, 5]


@corners
def test_i3_fold_between_step_and_commit_drops_the_drafts(name: str) -> None:
    model = Model(name, layout_of(name))
    model.load(range(4))
    model.step([0, 1], [4, 3])
    model.fold([0])
    rows = Rows.draft([0, 1], [4, 3])
    with pytest.raises(ReplayError, match="commit: row 0"):
        model.cache.commit(rows, [1, 3])
    model.commit([0, 3])
    model.check()


@corners
@given(
    window=st.integers(1, 12),
    draft=st.integers(1, 12),
    phase=st.integers(0, 50),
    accepted=st.lists(st.integers(0, 12), max_size=20),
)
@settings(max_examples=15)
def test_i4_there_is_always_room_for_a_draft(
    name: str, window: int, draft: int, phase: int, accepted: list[int]
) -> None:
    layout = layout_of(name, window=max(window, draft), max_draft=draft)
    model = Model(name, layout, slots=1)
    model.load([0], phase)
    length, limit = 0, layout.room - phase % (layout.room + 1)
    for number in accepted:
        model.step([0], [draft])
        model.commit([min(number, draft)])
        length += min(number, draft)
        if length > limit:
            length, limit = 0, layout.room
        assert model.cache.length.tolist() == [length]
        model.check()


@every
@given(tokens=st.integers(0, 40), window=st.integers(4, 40))
@settings(max_examples=8)
def test_i5_materialise_is_invariant_under_fold_and_dead_entries(name: str, tokens: int, window: int) -> None:
    cache = started(layout_of(name, window=window, max_draft=1))
    decode(cache, name, tokens)
    poison(cache, 0.0)
    before = cache.materialise(0, range(4))
    poison(cache)
    assert same(cache.materialise(0, range(4)), before)
    cache.fold(range(4))
    torch.testing.assert_close(cache.materialise(0, range(4)), before, rtol=1e-12, atol=1e-12)
    assert same(cache.materialise(0, range(4)), cache.views()[0]["checkpoint"])


@corners
@pytest.mark.parametrize(
    ("policy", "copy"),
    [
        (Precision(), "bf16"),
        (Precision("fp16", rounding="stochastic"), "bf16"),
        (Precision("bf16"), "fp16"),
        *((Precision(), copy) for copy in ("fp16", "fp8", "fp8_e5m2", "int8", "int4", "nvfp4")),
        (Precision("fp16", rounding="stochastic"), "nvfp4"),
        (Precision("bf16"), "int8"),
        (Precision("nvfp4", rounding="stochastic"), "int4"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("backend", ["", "torch"])
def test_i6_a_read_copy_changes_no_checkpoint(
    name: str, policy: Precision, copy: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAYSSM_CPU", backend)
    plain = layout_of(name, torch.float32, precision=policy)
    lossy = replace(plain, precision=replace(policy, read_copy=copy))
    caches = [started(plain, layers=2), started(lossy, layers=2)]

    def compare() -> None:
        for exact, copied in zip(caches[0].views(), caches[1].views(), strict=True):
            assert all(same(part, copied[part_name]) for part_name, part in exact.items() if "checkpoint" in part_name)
            encoded = encode(copied, lossy.precision, lossy.state_dim)
            assert encoded.keys() == {part_name for part_name in copied if part_name.startswith("read_copy")}
            assert all(same(part, copied[part_name]) for part_name, part in encoded.items())

    compare()
    for turn in range(12):
        counts = [turn % 5, 4, 3]
        rows = Rows.draft([0, 3, 1], counts, [t - 1 for n in counts for t in range(n)])
        for cache in caches:
            for layer in range(2):
                step(cache[layer], random_inputs(name, plain, sum(counts), generator(turn)), rows)
            cache.commit(rows, [turn % 5, 2, 3], path=[[0, 1, 2, 3][: turn % 5], [0, 1], [0, 1, 2]])
        compare()
    for cache in caches:
        cache.fork([0, 1], [1, 2])
        cache.reset([3])
        cache.import_([0], cache.export([1]))
        cache.fold([0, 2])
    compare()
    assert int(caches[0].folds.sum()) > 4


@every
def test_i7_committing_nothing_means_that_the_step_never_happened(name: str) -> None:
    layout = layout_of(name)
    cache = started(layout)
    decode(cache, name, 4)
    before, alive = picture(cache), live_parts(cache, range(4))
    rows = Rows.draft([0, 2, 1], [4, 1, 3], [-1, -1, 0, 1, -1, -1, 0, 0])
    step(cache[0], random_inputs(name, layout, 8, generator(4)), rows)
    cache.commit(rows, [0, 0, 0])
    assert changed(alive, live_parts(cache, range(4))) == []
    poison(cache, 0.0)
    after = picture(cache)
    assert [key for key in changed(before, after) if not key.startswith("0.")] == []


@every
@given(drafted=st.integers(1, 4), data=st.data(), length=st.integers(0, 5))
@settings(max_examples=10)
def test_i7_drafting_t_and_committing_n_equals_n_single_steps(
    name: str, drafted: int, data: st.DataObject, length: int
) -> None:
    layout = layout_of(name)
    taken = data.draw(st.integers(0, drafted))
    caches = [started(layout, 1), started(layout, 1)]
    for cache in caches:
        decode(cache, name, length)
    inputs = random_inputs(name, layout, drafted, generator(7))
    rows = Rows.draft([0], [drafted])
    together = step(caches[0][0], inputs, rows)
    caches[0].commit(rows, [taken])
    for t in range(taken):
        single = step(caches[1][0], take(inputs, [t]), Rows.decode([0]))
        caches[1].commit(Rows.decode([0]), [1])
        torch.testing.assert_close(single[0], together[t], rtol=1e-11, atol=1e-11)
    states = [cache.materialise(0, [0]) for cache in caches]
    torch.testing.assert_close(*states, rtol=1e-11, atol=1e-11)
    if caches[0].length.tolist() == caches[1].length.tolist():
        parts = [live_parts(cache, [0]) for cache in caches]
        assert all(same(parts[0][key], parts[1][key]) for key in ("0.0.key", "0.0.value"))
        torch.testing.assert_close(parts[0], parts[1], rtol=1e-11, atol=1e-11)


@corners
def test_i8_a_fork_shares_nothing_writable(name: str) -> None:
    model = Model(name, layout_of(name), layers=2)
    model.load(range(4), [3, 1, 4, 1])
    model.step([0, 1], [3, 2])
    model.commit([3, 1])
    model.fork([0, 0], [2, 3])
    for turn in range(10):
        slot = [0, 2, 3][turn % 3]
        untouched = live_parts(model.cache, [s for s in range(4) if s != slot])
        model.step([slot], [4])
        model.commit([turn % 5 if turn < 5 else 4])
        model.check()
        assert changed(untouched, live_parts(model.cache, [s for s in range(4) if s != slot])) == []


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_i9_a_row_does_not_depend_on_its_batch(name: str, dtype: torch.dtype) -> None:
    layout = layout_of(name, dtype)
    state = random_state(layout, 1, generator(2))
    alone, crowd = ReplayCache.allocate(layout, 1, 1), started(layout, 7)
    alone.load(0, [0], state)
    crowd.load(0, [5], state)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    for turn in range(10):
        count = turn % 4 + 1
        mine = random_inputs(name, layout, 12, generator(turn))
        rows = Rows.draft([5], [count])
        few = step(alone[0], take(mine, range(count)), Rows.draft([0], [count]))
        if turn % 3:
            slots, counts = [6, -1, 5, 2, 0], [turn % 5, 1, count, 3, 0]
            rows = Rows.draft(slots, counts)
            first = turn % 5 + 1
            order = [11] * first + list(range(count)) + [10] * 3
            many = step(crowd[0], take(mine, order), rows)[first : first + count]
            crowd.commit(rows, [0, 0, min(count, 3), 3, 0])
        else:
            many = step(crowd[0], take(mine, range(count)), rows)
            crowd.commit(rows, [min(count, 3)])
        alone.commit(Rows.draft([0], [count]), [min(count, 3)])
        torch.testing.assert_close(many, few, rtol=tolerance, atol=tolerance)
        both = crowd.materialise(0, [5]), alone.materialise(0, [0])
        torch.testing.assert_close(*both, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("slots", "accepted", "words"),
    [
        ([0, 4], [1, 1], "slots: row 1 has slot 4, expected 0…3 (or -1 for padding)"),
        ([-2, 0], [1, 1], "slots: row 0 has slot -2, expected 0…3 (or -1 for padding)"),
        ([2**32, 1], [1, 1], "slots: row 0 has slot 2147483647, expected 0…3 (or -1 for padding)"),
        ([1, 1], [1, 1], "slots: slot 1 comes twice in the batch (again at row 1)"),
        ([0, 1], [1, 2], "accepted: row 1 accepts 2 of 1 drafted tokens, expected 0…1"),
        ([0, 1], [-1, 0], "accepted: row 0 accepts -1 of 1 drafted tokens, expected 0…1"),
        ([0, 1], [2**32 + 1, 0], "accepted: row 0 accepts 2147483647 of 1 drafted tokens, expected 0…1"),
    ],
)
def test_i10_wrong_slots_and_counts_raise(slots: list[int], accepted: list[int], words: str) -> None:
    layout = layout_of("gdn")
    cache = started(layout)
    step(cache[0], random_inputs("gdn", layout, 2, generator(1)), Rows.decode([0, 1]))
    before = picture(cache)
    with pytest.raises(ReplayError) as caught:
        cache.commit(Rows.decode(slots), accepted)
    assert str(caught.value) == words
    if words.startswith("slots"):
        with pytest.raises(ReplayError) as caught:
            step(cache[0], random_inputs("gdn", layout, 2, generator(1)), Rows.decode(slots))
        assert str(caught.value) == words
    assert changed(before, picture(cache)) == []
