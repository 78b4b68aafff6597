"""The closed form in torch: long windows, strong decay, exponents, trees, pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from replayssm import LinearInputs, ReplayCache, Rows, step
from replayssm.backends import torch as backend
from replayssm.reference import token_loop
from support.makers import CORNERS, EVERY, generator, layout_of, random_inputs, take
from support.model import Model
from support.poison import poison

FALLING = [name for name, corner in CORNERS.items() if corner.decay != "none"]


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_CPU", "torch")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("window", [17, 40, 300])
def test_windows_longer_than_a_block(name: str, window: int) -> None:
    """A fold of many blocks, whole and ragged, equals the oracle."""
    model = Model(name, layout_of(name, window=window, max_draft=4), slots=2)
    model.load([0, 1], phase=[0, 3])
    for turn in range(window // 3 + 2):
        model.step([1, 0], [4, 3])
        model.commit([4, 1 + turn % 3])
        if turn % 10 == 9:
            model.check()
    model.check()
    assert 1 <= model.cache.folds.tolist()[1] <= 2
    model.fold([0, 1])
    model.check()


def strong(name: str, tokens: int, decay: float) -> tuple[LinearInputs, Tensor]:
    """Lowered float32 inputs whose log-decays go down to −``decay``, most of them small, and a state."""
    layout = layout_of(name, torch.float32, heads=8, groups=4, head_dim=16, state_dim=16)
    source = generator(7)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    shape = (tokens, 8) if layout.recurrence.decay == "head" else (tokens, 8, 16)
    uniform = torch.rand(shape, generator=source)
    k = rand(tokens, 4, 16)
    g = -decay * uniform**6
    beta = torch.rand(tokens, 8, generator=source)
    k = k / k.norm(dim=-1, keepdim=True)
    return LinearInputs(rand(tokens, 4, 16), k, rand(tokens, 8, 16), g, beta), rand(8, 16, 16)


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("decay", [1.0, 50.0])
@pytest.mark.parametrize("draft", [1, 4])
def test_strong_decay_is_as_exact_as_the_conventional_loop(name: str, decay: float, draft: int) -> None:
    """float32 against float64, teacher-forced: at most 1.1 × the error of the token loop, outputs and states."""
    tokens, window = 256, 64
    layout = layout_of(
        name, torch.float32, heads=8, groups=4, head_dim=16, state_dim=16, window=window, max_draft=draft
    )
    inputs, state = strong(name, tokens, decay)
    assert inputs.g is not None
    assert inputs.g.min() < -0.9 * decay
    exact = token_loop(layout, inputs, state)
    loop = token_loop(layout, inputs, state, dtype=torch.float32)
    cache = ReplayCache.allocate(layout, 1, 1)
    cache.load(0, [0], state[None])
    outputs = []
    for start in range(0, tokens, draft):
        rows = Rows.draft([0], [draft])
        outputs.append(step(cache[0], take(inputs, range(start, start + draft)), rows))
        cache.commit(rows, [draft])
    pairs = [
        (torch.cat(outputs), loop[0], exact[0]),
        (cache.materialise(0, [0]), loop[1][-1:], exact[1][-1:]),
    ]
    for got, conventional, want in pairs:
        error, bound = ((x.double() - want).square().mean().sqrt() for x in (got, conventional))
        assert error <= 1.1 * bound + 1e-7 * want.square().mean().sqrt()


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("draft", [1, 3])
def test_a_decay_to_nothing(name: str, draft: int) -> None:
    """g = −∞ and −1e30 forget everything before: no NaN, whether in the buffer, the draft or the fold."""
    layout = layout_of(name, window=8, max_draft=draft)
    inputs, state = strong(name, 24, 3.0)
    inputs = LinearInputs(
        *(x.double()[..., :5] for x in (inputs.q[:, :2], inputs.k[:, :2])),
        inputs.v[:, :4, :3].double(),
        inputs.g[:, :4].double().clone() if inputs.g.ndim == 2 else inputs.g[:, :4, :5].double().clone(),  # type: ignore
        inputs.beta[:, :4].double(),  # type: ignore[index]
    )
    assert inputs.g is not None
    inputs.g[5] = -torch.inf
    inputs.g[[9, 10], 1:3] = -torch.inf
    inputs.g[17] = -1e30
    start = state[:4, :3, :5].double()
    exact, after = token_loop(layout, inputs, start)
    cache = ReplayCache.allocate(layout, 1, 1)
    cache.load(0, [0], start[None])
    for first in range(0, 24, draft):
        poison(cache)
        rows = Rows.draft([0], [draft])
        out = step(cache[0], take(inputs, range(first, first + draft)), rows)
        torch.testing.assert_close(out, exact[first : first + draft], rtol=1e-11, atol=1e-11)
        cache.commit(rows, [draft])
        got = cache.materialise(0, [0])[0]
        torch.testing.assert_close(got, after[first + draft - 1], rtol=1e-11, atol=1e-11)


@given(st.integers(1, 7), st.integers(0, 2**16), st.booleans(), st.booleans())
def test_sums_along_paths(tokens: int, seed: int, channels: bool, tree: bool) -> None:
    """Path sums and pair sums against walking up the tree; each only adds numbers of its own segment."""
    source = generator(seed)
    g = -torch.rand((2, 3, tokens, 4) if channels else (2, 3, tokens), generator=source, dtype=torch.float64)
    draws = torch.rand(2, tokens, generator=source) * (torch.arange(tokens) + 1)
    parents = draws.long() - 1
    lines = parents if tree else torch.arange(-1, tokens - 1).expand(2, -1)
    along = backend._path_sums(g, parents if tree else None)
    between, earlier = backend._pair_sums(g, parents if tree else None)
    mask = earlier.expand(2, 1, tokens, tokens)
    for r in range(2):
        for i in range(tokens):
            total, at, above = torch.zeros_like(g[r, :, 0]), i, []
            while at >= 0:
                if at != i:
                    above.append(at)
                    torch.testing.assert_close(between[r, :, i, at], total)
                total = total + g[r, :, at]
                at = int(lines[r, at])
            torch.testing.assert_close(along[r, :, i], total)
            assert mask[r, 0, i].nonzero().flatten().tolist() == sorted(above)


@given(st.integers(0, 6), st.integers(0, 2**16))
def test_sums_after(entries: int, seed: int) -> None:
    g = -torch.rand(2, 3, entries, generator=generator(seed), dtype=torch.float64)
    got = backend._sums_after(g)
    for j in range(entries):
        torch.testing.assert_close(got[:, :, j], g[:, :, j + 1 :].sum(-1))


def test_small_sums_beside_a_large_one_keep_their_digits() -> None:
    """The exponent of a segment does not see what lies outside: −1e6 before it costs no digit."""
    g = torch.tensor([-1e6, -1e-3, -2e-3]).view(1, 1, 3)
    between, _ = backend._pair_sums(g, None)
    assert between[0, 0, 2, 0].item() == pytest.approx(-3e-3, rel=1e-6)
    assert backend._sums_after(g)[0, 0, 0].item() == pytest.approx(-3e-3, rel=1e-6)
    tree, _ = backend._pair_sums(g, torch.tensor([[-1, 0, 1]]))
    assert tree[0, 0, 2, 0].item() == pytest.approx(-3e-3, rel=1e-6)


@pytest.mark.parametrize("name", CORNERS)
def test_states_larger_than_a_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting rows into pieces changes nothing."""
    monkeypatch.setattr(backend, "_PIECE_BYTES", 1)
    model = Model(name, layout_of(name))
    model.load(range(4))
    for turn in range(4):
        model.step([3, 1, 0], [4, 2, 1])
        model.commit([4, turn % 3, 1])
        model.check()
    assert random_inputs(name, model.layout, 0, generator(0)).tokens == 0
