"""``step``: shapes, padding, dtypes, layouts of sizes that are not round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import Layout, Precision, ReplayCache, Rows, step
from replayssm.reference import token_loop
from support.caches import started
from support.makers import CORNERS, EVERY, generator, layout_of, map_tokens, random_inputs, random_state, spoil
from support.model import Model, conv_layout
from support.poison import same


@pytest.fixture(params=["", "torch"], ids=["default", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends of the CPU; without a C compiler they are one."""
    monkeypatch.setenv("REPLAYSSM_CPU", request.param)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_activations(name: str, dtype: torch.dtype) -> None:
    """Outputs in the activation dtype, as near to the oracle as it allows, over several folds."""
    model = Model(name, conv_layout(layout_of(name, dtype)))
    model.load(range(4))
    for turn in range(6):
        model.step([2, 0, 1], [4, turn % 5, 1], [-1, 0, 0, 2, *range(-1, turn % 5 - 1), -1] if turn % 2 else None)
        if turn % 2:
            model.commit([], [3, turn % 5 - 1, 0])
        else:
            model.commit([3, turn % 5, 1])
    assert model.draft is None
    assert int(model.cache.folds.max()) >= 2


@pytest.mark.parametrize("name", CORNERS)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    p=st.integers(1, 4),
    k=st.integers(1, 4),
    draft=st.integers(1, 5),
    room=st.integers(0, 5),
)
@settings(max_examples=12)
def test_any_sizes(name: str, heads: int, groups: int, p: int, k: int, draft: int, room: int) -> None:
    sizes = {"heads": heads * groups, "groups": groups, "head_dim": p, "state_dim": k}
    model = Model(name, layout_of(name, window=draft + room, max_draft=draft, **sizes), slots=2)
    model.load([1, 0])
    for _ in range(3):
        model.step([1, 0], [draft, 1])
        model.commit([draft // 2, 1])
        model.check()


@pytest.mark.parametrize("name", CORNERS)
def test_padding_is_zero_whatever_it_holds(name: str) -> None:
    """Padding rows anywhere, and tokens that no row owns: zero, even where the inputs are NaN."""
    layout = layout_of(name)
    inputs = random_inputs(name, layout, 9, generator(0))
    rows = Rows.draft([-1, 2, -1, 0, -1], [2, 1, 0, 3, 1])
    dead = [0, 1, 6, 7, 8]
    outputs = []
    for given_inputs in (inputs, spoil(inputs, dead)):
        cache = started(layout)
        outputs.append(step(cache[0], given_inputs, rows))
        cache.commit(rows, [2, 1, 0, 2, 1])
        assert cache.length.tolist() == [2, 0, 1, 0]
    assert same(*outputs)
    assert not outputs[0][dead].any()
    assert outputs[0][[2, 3, 4, 5]].abs().sum(-1).all()


@pytest.mark.parametrize("name", EVERY)
def test_inputs_that_are_not_contiguous(name: str) -> None:
    layout = layout_of(name)
    inputs = random_inputs(name, layout, 6, generator(0))
    strided = map_tokens(inputs, lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0))
    rows = Rows.draft([3, 1], [4, 2])
    outputs = [step(started(layout)[0], x, rows) for x in (inputs, strided)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_row_order_and_slot_numbers_do_not_matter(name: str) -> None:
    layout = layout_of(name)
    state = random_state(layout, 3, generator(4))
    inputs = random_inputs(name, layout, 6, generator(0))
    outputs = []
    for slots in ([0, 1, 2], [5, 3, 4]):
        cache = ReplayCache.allocate(layout, 1, 6)
        cache.load(0, slots, state)
        outputs.append(step(cache[0], inputs, Rows.draft(slots, [1, 3, 2])))
    assert same(*outputs)
    for r, tokens in enumerate(([0], [1, 2, 3], [4, 5])):
        part = map_tokens(inputs, lambda x, t=tokens: x[t])
        want, _ = token_loop(layout, part, state[r])
        torch.testing.assert_close(outputs[0][tokens], want, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("backend")
def test_a_read_copy_is_what_steps_read() -> None:
    """With a bfloat16 copy the outputs are those of the rounded checkpoint, the state is not."""
    layout = layout_of("gdn", torch.float32, precision=Precision(read_copy="bf16"))
    cache = started(layout)
    inputs = random_inputs("gdn", layout, 2, generator(0))
    state = cache.views()[0]["checkpoint"][1].clone()
    out = step(cache[0], inputs, Rows.draft([1], [2]))
    cache.commit(Rows.draft([1], [2]), [2])
    rounded, _ = token_loop(layout, inputs, state.bfloat16().float())
    exact, after = token_loop(layout, inputs, state)
    torch.testing.assert_close(out.double(), rounded, rtol=1e-5, atol=1e-6)
    assert (out.double() - exact).abs().max() > 1e-4
    torch.testing.assert_close(cache.materialise(0, [1])[0].double(), after[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("buffer", ["bf16", "fp16", "fp32"])
def test_the_dtype_of_written_values_never_reaches_the_state(buffer: str) -> None:
    """``u`` is derived: a narrow one changes outputs inside the window and no fold."""
    layouts = [layout_of("gdn", torch.float32, precision=Precision(buffer=b)) for b in (buffer, None)]

    def run(layout: Layout) -> torch.Tensor:
        cache = started(layout)
        for turn in range(9):
            rows = Rows.draft([0, 2], [4, 3])
            step(cache[0], random_inputs("gdn", layout, 7, generator(turn)), rows)
            cache.commit(rows, [3, turn % 4])
        cache.fold(range(4))
        return cache.views()[0]["checkpoint"]

    assert same(run(layouts[0]), run(layouts[1]))
