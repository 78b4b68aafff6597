"""Every rule: the message in the caller's words, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import replayssm
from replayssm import (
    Conv,
    GdnInputs,
    KdaInputs,
    Layout,
    LinearInputs,
    Mamba2Inputs,
    Precision,
    ReplayCache,
    ReplayError,
    Rows,
    checks,
    conv_step,
    step,
)
from support.makers import generator, layout_of, random_inputs
from support.model import Model, conv_layout
from support.poison import changed, picture

RANGE = "expected 0…3 (or -1 for padding)"


def loaded(name: str = "gdn", layers: int = 2, dtype: torch.dtype = torch.float32) -> Model:
    """Four slots, loaded and stepped; slots 0 and 1 have drafts that are not committed."""
    model = Model(name, conv_layout(layout_of(name, dtype)), layers=layers)
    model.load(range(4))
    model.step([0, 1, 2], [2, 3, 1])
    model.commit([2, 1, 0])
    model.step([0, 1], [2, 3])
    return model


def gdn(**changes: Any) -> GdnInputs:
    inputs = random_inputs("gdn", layout_of("gdn", torch.float32), 5, generator(0))
    assert isinstance(inputs, GdnInputs)
    return replace(inputs, **changes)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def drafted(*slots: int) -> Rows:
    return Rows.draft(list(slots), [2, 3][: len(slots)])


def stepping(rows: Rows, inputs: Any = None) -> Callable[[ReplayCache], object]:
    return lambda cache: step(cache[0], gdn() if inputs is None else inputs, rows)


def committing(rows: Rows, accepted: Any, path: Any = None) -> Callable[[ReplayCache], object]:
    return lambda cache: cache.commit(rows, accepted, path=path)


def convolving(rows: Rows, activation: Any = "silu", **given: torch.Tensor) -> Callable[[ReplayCache], object]:
    args = {"x": zeros(5, 3), "weight": zeros(3, 4), "bias": zeros(3), **given}
    return lambda cache: conv_step(cache[0], args["x"], args["weight"], args["bias"], rows, activation)


STATE = (4, 3, 5)
PLAIN = Rows.draft([0, 1], [2, 3])
WRONG: dict[str, Callable[[ReplayCache], object]] = {
    # Batches
    f"slots: row 1 has slot 4, {RANGE}": stepping(drafted(0, 4)),
    f"slots: row 0 has slot -2, {RANGE}": stepping(drafted(-2, 1)),
    "slots: slot 1 comes twice in the batch (again at row 1)": stepping(drafted(1, 1)),
    "rows: row 0 brings 5 tokens, but the layout has max_draft=4; raise max_draft or draft fewer": stepping(
        Rows.draft([3], [5])
    ),
    "rows: expected Rows, got list": stepping([0, 1]),  # type: ignore[arg-type]
    "offsets: must not fall, but row 1 runs from 3 to 2": stepping(Rows(torch.tensor([2, 3]), torch.tensor([0, 3, 2]))),
    "offsets: expected to start at 0, got 1": stepping(Rows(torch.tensor([2]), torch.tensor([1, 2]))),
    "offsets: expected rows + 1 = 3 entries, got 2": stepping(Rows(torch.tensor([2, 3]), torch.tensor([0, 2]))),
    "parents: expected one entry a token (5), got 2": stepping(Rows.draft([0, 1], [2, 3], [-1, 0])),
    "parents: token 1 of row 1 has parent 1, expected -1 (the root) or an earlier token 0…0 of its row": stepping(
        Rows.draft([0, 1], [2, 3], [-1, 0, -1, 1, 0])
    ),
    "parents: token 0 of row 0 has parent -2, expected -1 (the root) or an earlier token 0…-1 of its row": stepping(
        Rows.draft([0, 1], [2, 3], [-2, 0, -1, 1, 0])
    ),
    "step: row 0 (slot 1) brings 2 tokens to layer 0, which holds 3 uncommitted ones of an earlier step; "
    "commit them first (accepted=0 drops them)": stepping(drafted(1)),
    # Inputs
    "inputs: rows own 7 tokens, got N=5": stepping(Rows.draft([3, 2], [4, 3])),
    "inputs: expected Mamba2Inputs, GdnInputs, KdaInputs or LinearInputs, got Tensor": stepping(PLAIN, zeros(5, 4, 3)),
    "v: expected [N, heads=4, head_dim=3], got [5, 2, 3] (GDN layout)": stepping(PLAIN, gdn(v=zeros(5, 2, 3))),
    "k: expected [N=5, groups=2, state_dim=5], got [4, 2, 5] (GDN layout)": stepping(PLAIN, gdn(k=zeros(4, 2, 5))),
    "q: expected a torch.Tensor, got list": stepping(PLAIN, gdn(q=[0.0])),
    "q: expected float32, got bfloat16": stepping(PLAIN, gdn(q=zeros(5, 2, 5, dtype=torch.bfloat16))),
    "a: expected float32, got float64": stepping(PLAIN, gdn(a=zeros(5, 4, dtype=torch.float64))),
    "b: expected [N=5, heads=4], got [5, 4, 1] (GDN layout)": stepping(PLAIN, gdn(b=zeros(5, 4, 1))),
    "A_log: expected [heads=4], got [2] (GDN layout)": stepping(PLAIN, gdn(A_log=zeros(2))),
    "dt_bias: expected a torch.Tensor, got NoneType": stepping(PLAIN, gdn(dt_bias=None)),
    "A_log: expected a tensor on cpu (where the cache is), got one on meta": stepping(
        PLAIN, gdn(A_log=torch.zeros(4, device="meta"))
    ),
    "inputs: KdaInputs needs decay='channel', update='delta', but the layout is GDN with decay='head', "
    "update='delta'": stepping(PLAIN, KdaInputs(*(zeros(1) for _ in range(7)))),
    "inputs: Mamba2Inputs needs decay='head', update='add', but the layout is GDN with decay='head', "
    "update='delta'": stepping(PLAIN, Mamba2Inputs(*(zeros(1) for _ in range(5)))),
    "g: GDN has decay 'head', expected its log-decay, got None": stepping(
        PLAIN, LinearInputs(zeros(5, 2, 5), zeros(5, 2, 5), zeros(5, 4, 3))
    ),
    "g: a log-decay must be ≤ 0, got 0.5": stepping(
        PLAIN, LinearInputs(zeros(5, 2, 5), zeros(5, 2, 5), zeros(5, 4, 3), zeros(5, 4) + 0.5)
    ),
    "layer: expected cache[i], got ReplayCache": lambda cache: step(cache, gdn(), PLAIN),  # type: ignore[arg-type]
    "layer: expected 0…1, got 2": lambda cache: cache[2],
    "layer: expected 0…1, got -1": lambda cache: cache[-1],
    "layer: expected an integer, got 'a'": lambda cache: cache["a"],  # type: ignore[index]
    # Commit
    "accepted: row 1 accepts 4 of 3 drafted tokens, expected 0…3": committing(PLAIN, [2, 4]),
    "accepted: row 0 accepts -1 of 2 drafted tokens, expected 0…2": committing(PLAIN, [-1, 3]),
    "accepted: expected one entry a row (2), got 1": committing(PLAIN, [2]),
    "accepted: expected int32 or int64, got float32": committing(PLAIN, zeros(2)),
    "accepted: expected one dimension [R], got [2, 1]": committing(PLAIN, zeros(2, 1, dtype=torch.int32)),
    "accepted: expected a tensor or a sequence of integers, got list": committing(PLAIN, [1.0, 2]),
    "commit: row 0 (slot 2) accepts 1 of 1 tokens, but layer 0 holds 0 uncommitted ones; step every layer with these "
    "rows first": committing(Rows.decode([2]), [1]),
    "path: expected one line a row (2), got 1": committing(PLAIN, [1, 1], [[0]]),
    "path: row 1 accepts 2 tokens, expected as many entries and then -1, got [0]": committing(
        PLAIN, [1, 2], [[0], [0]]
    ),
    "path: row 0 accepts 1 tokens, expected as many entries and then -1, got [0, 1]": committing(
        PLAIN, [1, 2], [[0, 1], [0, 1]]
    ),
    "path: row 0 names token 2, expected 0…1": committing(PLAIN, [1, 1], [[2], [0]]),
    "path: in row 1, token 2 does not follow token 0 (its parent is 1)": committing(PLAIN, [1, 2], [[0], [0, 2]]),
    "path: in row 0, token 1 does not follow token -1 (its parent is 0)": committing(PLAIN, [1, 0], [[1], [-1]]),
    "path: in row 1, token 1 does not follow token 0 (its parent is -1); row 1 is a tree and accepts 2 tokens: "
    "pass path=": committing(Rows.draft([0, 1], [2, 3], [-1, 0, -1, -1, 0]), [2, 2]),
    "path: expected integers [R, T] or a sequence of integers a row": committing(PLAIN, [1, 1], [["a"], [0.0]]),
    "path: expected integers [R, T], got float32 [2, 2]": committing(PLAIN, [1, 1], zeros(2, 2)),
    # Slots of the other verbs
    f"slots: row 0 has slot 9, {RANGE}": lambda cache: cache.fold([9]),
    "slots: slot 2 comes twice in the batch (again at row 2)": lambda cache: cache.reset([2, -1, 2]),
    f"slots: row 1 has slot -3, {RANGE}": lambda cache: cache.materialise(0, [0, -3]),
    "slots: row 0 has slot -1, expected 0…3": lambda cache: cache.export([-1]),
    "slots: expected a tensor or a sequence of integers, got int": lambda cache: cache.fold(3),  # type: ignore[arg-type]
    "slots: expected a tensor or a sequence of integers, got str": lambda cache: cache.fold("01"),  # type: ignore
    "src: row 1 has slot 4, expected 0…3": lambda cache: cache.fork([0, 4], [1, 2]),
    "src: row 0 has slot -1, expected 0…3": lambda cache: cache.fork([-1], [1]),
    "dst: slot 1 comes twice in the batch (again at row 1)": lambda cache: cache.fork([0, 0], [1, 1]),
    "dst: expected as many slots as src (2), got 1": lambda cache: cache.fork([0, 1], [2]),
    # Load
    "state: expected [R=1, heads=4, head_dim=3, state_dim=5], got [2, 4, 3, 5] (GDN layout)": lambda cache: cache.load(
        0, [0], zeros(2, *STATE)
    ),
    "state: expected float32, got float16": lambda cache: cache.load(0, [0], zeros(1, *STATE, dtype=torch.float16)),
    "state: expected a tensor on cpu (where the cache is), got one on meta": lambda cache: cache.load(
        0, [0], torch.zeros(1, *STATE, device="meta")
    ),
    "phase: expected at least 0, got -1": lambda cache: cache.load(0, [0], zeros(1, *STATE), phase=-1),
    "phase: expected one number or one a row (1), got 2": lambda cache: cache.load(0, [0], zeros(1, *STATE), [1, 2]),
    "tail: expected [R=1, channels=3, width - 1=3], got [1, 3, 4] (GDN layout)": lambda cache: cache.load_conv(
        0, [0], zeros(1, 3, 4)
    ),
    "tail: expected float32, got int64": lambda cache: cache.load_conv(0, [0], zeros(1, 3, 3, dtype=torch.int64)),
    # Convolution
    "x: expected [N, channels=3], got [5, 4] (GDN layout)": convolving(PLAIN, x=zeros(5, 4)),
    "x: expected float32, got float16": convolving(PLAIN, x=zeros(5, 3, dtype=torch.float16)),
    "x: rows own 5 tokens, got N=4": convolving(PLAIN, x=zeros(4, 3)),
    "weight: expected [channels=3, width=4], got [3, 3] (GDN layout)": convolving(PLAIN, weight=zeros(3, 3)),
    "bias: expected [channels=3], got [1] (GDN layout)": convolving(PLAIN, bias=zeros(1)),
    "bias: expected float32, got float64": convolving(PLAIN, bias=zeros(3, dtype=torch.float64)),
    "activation: got 'gelu', supported: 'silu', None": convolving(PLAIN, "gelu"),
    "layer: expected cache[i], got NoneType": lambda cache: conv_step(None, *(zeros(1),) * 3, PLAIN),  # type: ignore
}


@pytest.mark.parametrize("words", WRONG)
def test_the_words_and_nothing_written(words: str) -> None:
    cache = loaded().cache
    before = picture(cache)
    with pytest.raises(ReplayError) as caught:
        WRONG[words](cache)
    assert str(caught.value) == words
    assert changed(before, picture(cache)) == []


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("layers: expected at least 1, got 0", lambda: ReplayCache.allocate(layout_of("gdn"), 0, 1)),
        ("slots: expected at least 1, got 0", lambda: ReplayCache.allocate(layout_of("gdn"), 1, 0)),
        ("slots: expected an integer, got 2.0", lambda: ReplayCache.allocate(layout_of("gdn"), 1, 2.0)),  # type: ignore
        ("seed: expected 0…9223372036854775807, got -1", lambda: ReplayCache.allocate(layout_of("gdn"), 1, 1, seed=-1)),
        ("layout: expected a Layout, got int", lambda: ReplayCache.allocate(3, 1, 1)),  # type: ignore[arg-type]
        ("layout: expected a Layout, got dict", lambda: ReplayCache.over({}, [])),  # type: ignore[arg-type]
        ("views: expected one mapping a layer, got none", lambda: ReplayCache.over(layout_of("gdn"), [])),
        ("views: layer 0 has no tensor 'checkpoint'", lambda: ReplayCache.over(layout_of("gdn"), [{}])),
        ("counts: expected at least 0, got -1", lambda: Rows.draft([0], [-1])),
        ("counts: expected one entry a row (1), got 2", lambda: Rows.draft([0], [1, 2])),
        ("slots: expected one dimension [R], got []", lambda: Rows.decode(torch.tensor(3))),
        ("slots: expected a tensor or a sequence of integers, got list", lambda: Rows.decode([True])),
        ("offsets: expected int32 or int64, got bool", lambda: Rows(torch.tensor([0]), torch.tensor([False, True]))),
    ],
)
def test_constructors(words: str, make: Callable[[], object]) -> None:
    with pytest.raises(ReplayError) as caught:
        make()
    assert str(caught.value) == words


def test_views_that_do_not_fit() -> None:
    layout = layout_of("gdn")
    good = ReplayCache.allocate(layout, 2, 3).views()
    for words, change in {
        "views[1]['value']: expected [slots=3, 4=4, 9=9, 3=3], got [3, 4, 9, 2] (GDN layout)": {
            "value": zeros(3, 4, 9, 2, dtype=torch.float64)
        },
        "views[1]['weight']: expected float64, got float32": {"weight": zeros(3, 4, 9)},
        "views[1]['weight']: expected a tensor on cpu (where the cache is), got one on meta": {
            "weight": torch.zeros(3, 4, 9, dtype=torch.float64, device="meta")
        },
        "views: layer 1 has ['checkpoint', 'decay', 'extra', 'key', 'key_scale', 'value', 'weight', 'written'], "
        "expected ['checkpoint', 'decay', 'key', 'key_scale', 'value', 'weight', 'written']": {"extra": zeros(1)},
    }.items():
        with pytest.raises(ReplayError) as caught:
            ReplayCache.over(layout, [good[0], {**good[1], **change}])
        assert str(caught.value) == words


def test_a_layout_without_convolution() -> None:
    layout = layout_of("gdn", torch.float32)
    cache = ReplayCache.allocate(layout, 1, 2)
    words = "the layout has no convolution; give it conv=Conv(channels, width)"
    with pytest.raises(ReplayError, match=r"^conv_step: ") as caught:
        conv_step(cache[0], zeros(2, 3), zeros(3, 4), None, Rows.decode([0, 1]))
    assert str(caught.value) == f"conv_step: {words}"
    for verb in (lambda: cache.load_conv(0, [0], zeros(1, 3, 3)), lambda: cache.conv_tail(0, [0])):
        with pytest.raises(ReplayError) as caught:
            verb()
        assert str(caught.value) == f"conv: {words}"


def test_a_layer_that_was_not_stepped() -> None:
    """Every layer and the convolution must have had the rows' tokens."""
    model = loaded()
    model.commit([1, 1])
    rows = Rows.draft([0], [2])
    inputs = random_inputs("gdn", model.layout, 2, generator(0))
    steps = [lambda n=n: step(model.cache[n], inputs, rows) for n in range(2)]
    convolutions = [lambda n=n: conv_step(model.cache[n], zeros(2, 3), zeros(3, 4), None, rows) for n in range(2)]
    missing = ["layer 0", "layer 1", "layer 0", "layer 1"]
    verbs = ["step every", "step every", "conv_step every", "conv_step every"]
    for run, layer, verb in zip([*steps, *convolutions], missing, verbs, strict=True):
        before = picture(model.cache)
        with pytest.raises(ReplayError, match=rf"^commit: row 0 \(slot 0\) accepts 2 of 2.*{layer}.*; {verb}"):
            model.cache.commit(rows, [2])
        assert changed(before, picture(model.cache)) == []
        run()
    model.cache.commit(rows, [2])


def test_an_error_is_a_value_error() -> None:
    assert issubclass(ReplayError, ValueError)
    assert replayssm.ReplayError is checks.ReplayError


def test_wrong_words_for_layouts_are_in_test_layout() -> None:
    with pytest.raises(ReplayError, match=r"^channels: expected at least 1, got 0$"):
        Conv(0)
    with pytest.raises(ReplayError, match=r"^precision: expected a Precision, got 'fp32'$"):
        Layout(replayssm.GDN, 1, 1, 1, 1, precision="fp32")  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match=r"^checkpoint: got 'fp9', supported: 'fp64', 'fp32', "):
        Precision("fp9")
