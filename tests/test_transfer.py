"""Export and import: through files, into other caches, and what happens to data that are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from replayssm import Layout, Precision, ReplayCache, ReplayError, Rows, conv_step, step
from replayssm.transfer import HEADER
from support.caches import decode, started
from support.makers import CORNERS, generator, layout_of, random_inputs, random_state, take
from support.model import Model, conv_layout
from support.poison import changed, live_parts, picture, poison, same

corners = pytest.mark.parametrize("name", CORNERS)


def filled(name: str, layout: Layout | None = None, layers: int = 2) -> Model:
    """Four slots of different lengths, with convolution tails."""
    model = Model(name, conv_layout(layout_of(name)) if layout is None else layout, layers)
    model.load(range(4))
    model.step([0, 1, 3], [4, 2, 1])
    model.commit([4, 1, 1])
    model.step([0, 3], [1, 3])
    model.commit([1, 3])
    return model


def test_another_request_goes_on_with_its_own_phase() -> None:
    """Where a sequence was loaded and has no entries; what has begun folds as it would have."""
    layout = layout_of("gdn", window=8, max_draft=1)
    source, state = started(layout, 3), random_state(layout, 1, generator(3))
    decode(source, "gdn", 9)
    source.load(0, [1], state, phase=2)
    decode(source, "gdn", 3)
    source.load(0, [0], state, phase=2)
    assert source.folds.tolist() == [0, 0, 1]
    data = source.export(range(3))
    other, wanted = started(layout, 3), started(layout, 3)
    other.import_(range(3), data, phase=[5, 5, 5])
    wanted.import_(range(3), data)
    wanted.load(0, [0], state, phase=5)
    for _ in range(8):
        assert not changed(picture(other), picture(wanted))
        decode(other, "gdn", 1)
        decode(wanted, "gdn", 1)
    before = picture(other)
    with pytest.raises(ReplayError, match="phase: expected one number or one a row"):
        other.import_(range(3), data, phase=[1])
    assert not changed(before, picture(other))


@corners
def test_through_a_safetensors_file(name: str) -> None:
    model = filled(name)
    data = model.cache.export([3, 0])
    again = load(save(data))
    assert data.keys() == again.keys()
    assert all(same(data[key], again[key]) for key in data)
    other = ReplayCache.allocate(model.layout, 2, 6, seed=3)
    poison(other)
    other.import_([5, 2], again)
    alive = live_parts(model.cache, [3, 0]), live_parts(other, [5, 2])
    for left, right in zip(alive[0].values(), alive[1].values(), strict=True):
        assert same(left, right)
    assert other.length.tolist() == [0, 0, 5, 0, 0, 4]


@corners
def test_outputs_afterwards_are_the_same_to_the_bit(name: str) -> None:
    """The same layout and slots elsewhere: outputs, folds and states go on alike."""
    model = filled(name, layout_of(name), layers=1)
    other = ReplayCache.allocate(model.layout, 1, 4)
    other.import_([0, 1, 2, 3], model.cache.export([0, 1, 2, 3]))
    for turn in range(8):
        rows = Rows.draft([1, 0, 3], [4, 1, turn % 4])
        inputs = random_inputs(name, model.layout, 5 + turn % 4, generator(turn))
        assert same(step(model.cache[0], inputs, rows), step(other[0], inputs, rows))
        for cache in (model.cache, other):
            cache.commit(rows, [3, 1, turn % 4 // 2])
    assert same(model.cache.materialise(0, range(4)), other.materialise(0, range(4)))
    assert torch.equal(model.cache.length, other.length)
    assert torch.equal(model.cache.folds, other.folds)


@corners
@pytest.mark.parametrize(("window", "draft"), [(5, 1), (4, 4), (9, 2), (40, 3)])
def test_into_another_window(name: str, window: int, draft: int) -> None:
    model = filled(name)
    other = Model(name, replace(model.layout, window=window, max_draft=draft), 2, seed=9)
    other.taps, other.bias = model.taps, model.bias
    other.cache.import_([2, 0, 1], model.cache.export([0, 1, 3]))
    for there, here in zip([2, 0, 1], [0, 1, 3], strict=True):
        other.truth[there] = model.truth[here].copy()
    other.check()
    for _ in range(5):
        other.step([1, 2, 0], [draft, 1, draft])
        other.commit([draft, 1, 0])
        other.check()


@corners
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        (Precision("fp32", read_copy="bf16"), 0.0),
        (Precision("fp32", buffer="bf16"), 1e-6),
        (Precision("fp16"), 2e-3),
        (Precision("bf16", rounding="stochastic"), 2e-2),
    ],
    ids=["copy", "buffer", "fp16", "bf16"],
)
def test_into_another_precision(name: str, policy: Precision, tolerance: float) -> None:
    """The state arrives as well as the target can hold it, and comes back."""
    model = filled(name, conv_layout(layout_of(name, torch.float32)))
    cache = model.cache
    other = ReplayCache.allocate(replace(model.layout, precision=policy), 2, 4)
    poison(other)
    other.import_([1, 2], cache.export([0, 3]))
    for layer in range(2):
        want = cache.materialise(layer, [0, 3])
        got = other.materialise(layer, [1, 2])
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 3)
        assert same(other.conv_tail(layer, [1, 2]), cache.conv_tail(layer, [0, 3]))
        if "read_copy" in other.layout.tensors:
            views = other.views()[layer]
            assert same(views["read_copy"], views["checkpoint"].bfloat16())
    cache.import_([0], other.export([2]))
    torch.testing.assert_close(
        cache.materialise(0, [0]), other.materialise(0, [2]), rtol=max(tolerance, 1e-6), atol=1e-6
    )


def test_stochastic_rounding_goes_on_where_it_was() -> None:
    """The number of roundings travels, so that a moved sequence rounds as the unmoved one."""
    layout = layout_of("gdn", torch.float32, precision=Precision("bf16", rounding="stochastic"), window=4, max_draft=1)
    here, there = started(layout), ReplayCache.allocate(layout, 1, 4)
    decode(here, "gdn", 6)
    there.import_(range(4), here.export(range(4)))
    for cache in (here, there):
        decode(cache, "gdn", 7, seed=8)
        cache.fold(range(4))
    assert same(here.views()[0]["checkpoint"], there.views()[0]["checkpoint"])


@corners
def test_stale_bytes_beyond_the_length_do_not_travel(name: str) -> None:
    """They may be another request's."""
    model = filled(name)
    poison(model.cache, 42.0)
    length = model.cache.length.tolist()
    data = model.cache.export([2, 0])
    for layer in range(2):
        for key, spec in model.layout.tensors.items():
            if spec.entries:
                for row, slot in enumerate([2, 0]):
                    assert not data[f"{layer}.{key}"][row][:, length[slot] :].any()
                    assert not (data[f"{layer}.{key}"] == 42.0).any()
    assert "0.read_copy" not in data


def edit(data: dict[str, Tensor], change: Callable[[dict[str, Any]], object]) -> dict[str, Tensor]:
    """The data with another header."""
    header = json.loads(bytes(data[HEADER].tolist()))
    change(header)
    return {**data, HEADER: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "foreign": lambda h: h.update(format="other"),
    "version": lambda h: h.update(version=2),
    "layers": lambda h: h.update(layers=3),
    "heads": lambda h: h["layout"]["sizes"].__setitem__(0, 8),
    "groups": lambda h: h["layout"]["sizes"].__setitem__(1, 4),
    "state_dim": lambda h: h["layout"]["sizes"].__setitem__(3, 6),
    "window": lambda h: h["layout"]["sizes"].__setitem__(4, 8),
    "too many sizes": lambda h: h["layout"]["sizes"].append(1),
    "dtype": lambda h: h["layout"].update(dtype="float32"),
    "no dtype": lambda h: h["layout"].update(dtype="ones"),
    "recurrence": lambda h: h["layout"].update(recurrence=["x", "none", "nothing"]),
    "precision": lambda h: h["layout"].update(precision={"checkpoint": "float16", "buffer": None}),
    "conv": lambda h: h["layout"].update(conv=[3, 5]),
    "no conv": lambda h: h["layout"].update(conv=None),
    "no layout": lambda h: h.pop("layout"),
    "length negative": lambda h: h["length"].__setitem__(0, -1),
    "length past the window": lambda h: h["length"].__setitem__(0, 10),
    "length missing": lambda h: h["length"].pop(),
    "length past the room": lambda h: h["length"].__setitem__(0, 6),
    "length no list": lambda h: h.update(length=3),
    "length text": lambda h: h["length"].__setitem__(0, "3"),
    "folds no list": lambda h: h.update(folds=0),
    "folds past int32": lambda h: h["folds"].__setitem__(0, 2**40),
    "limit past the room": lambda h: h["limit"].__setitem__(0, 8),
    "limit past int32": lambda h: h["limit"].__setitem__(0, 2**31),
    "limit a fraction": lambda h: h["limit"].__setitem__(0, 0.5),
}


@pytest.mark.parametrize("name", ["gdn", "gla"])
@pytest.mark.parametrize("kind", HEADERS)
def test_an_edited_header_raises_and_changes_nothing(name: str, kind: str) -> None:
    model = filled(name)
    data = edit(model.cache.export([0, 1]), HEADERS[kind])
    before = picture(model.cache)
    with pytest.raises(ReplayError, match=r"^data: "):
        model.cache.import_([2, 3], data)
    assert changed(before, picture(model.cache)) == []


@corners
@given(data=st.data())
@settings(max_examples=25)
def test_truncated_data_raise_and_change_nothing(name: str, data: st.DataObject) -> None:
    model = filled(name)
    whole = model.cache.export([0, 1])
    key = data.draw(st.sampled_from(sorted(whole)))
    cut = data.draw(st.sampled_from(["gone", "short", "cast", "row", "none"]))
    tensor = whole[key]
    damaged: dict[str, Any] = {
        "gone": {k: v for k, v in whole.items() if k != key},
        "short": {**whole, key: tensor.flatten()[:-1]},
        "cast": {**whole, key: tensor.to(torch.int16)},
        "row": {**whole, key: tensor[:1]},
        "none": {**whole, key: None},
    }[cut]
    before = picture(model.cache)
    with pytest.raises(ReplayError, match=r"^data: "):
        model.cache.import_([2, 3], damaged)
    assert changed(before, picture(model.cache)) == []


@given(at=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=60)
def test_a_flipped_byte_of_the_header_raises_or_is_harmless(at: int, byte: int) -> None:
    """Whatever a header says: an error that changes nothing, or a cache that still works."""
    model = filled("gdn", layers=1)
    data = model.cache.export([0, 1])
    raw = data[HEADER].clone()
    raw[at % len(raw)] = byte
    before = picture(model.cache)
    try:
        model.cache.import_([2, 3], {**data, HEADER: raw})
    except ReplayError:
        assert changed(before, picture(model.cache)) == []
    else:
        assert bool((model.cache.length <= model.layout.room).all())
        assert bool((model.cache._limit <= model.layout.room).all())


@pytest.mark.parametrize("junk", [None, {}, {HEADER: torch.zeros(3)}, {HEADER: torch.zeros(3, dtype=torch.uint8)}, 5])
def test_foreign_data(junk: Any) -> None:
    cache = started(layout_of("gdn"))
    before = picture(cache)
    with pytest.raises(ReplayError, match=r"^data: "):
        cache.import_([0], junk)
    assert changed(before, picture(cache)) == []


def test_another_number_of_slots_or_another_cache() -> None:
    model = filled("gdn")
    data = model.cache.export([0, 1])
    before = picture(model.cache)
    with pytest.raises(ReplayError, match=r"^slots: the data hold 2 sequences, got 1 slots$"):
        model.cache.import_([0], data)
    with pytest.raises(ReplayError, match=r"^slots: slot 1 comes twice"):
        model.cache.import_([1, 1], data)
    assert changed(before, picture(model.cache)) == []
    others = {
        "recurrence is GDN, this cache has KDA": conv_layout(layout_of("kda")),
        "head_dim is 3, this cache has 2": conv_layout(layout_of("gdn", head_dim=2)),
        "conv is Conv(channels=3, width=4), this cache has None": layout_of("gdn"),
        "dtype is torch.float64, this cache has torch.float32": conv_layout(layout_of("gdn", torch.float32)),
    }
    for words, layout in others.items():
        cache = ReplayCache.allocate(layout, 2, 2)
        with pytest.raises(ReplayError) as caught:
            cache.import_([0, 1], data)
        assert str(caught.value) == f"data: {words}"


def test_drafts_do_not_travel() -> None:
    """An export between a step and its commit holds the committed sequence; the source can still commit."""
    model = filled("gdn")
    model.step([0, 1], [3, 2])
    data = model.cache.export([0])
    model.commit([3, 2])
    other = ReplayCache.allocate(model.layout, 2, 1)
    other.import_([0], data)
    x = torch.zeros(1, 3, dtype=torch.float64)
    for layer in range(2):
        conv_step(other[layer], x, model.taps[layer], None, Rows.decode([0]))
        step(other[layer], take(random_inputs("gdn", model.layout, 1, generator(0)), [0]), Rows.decode([0]))
    model.check()
