"""The C kernels against the torch backend, on everything that one of them could get wrong by itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm import (
    GDN,
    KDA,
    MAMBA2,
    Layout,
    LinearInputs,
    Precision,
    Recurrence,
    ReplayCache,
    ReplayError,
    Rows,
    step,
)
from replayssm.backends import cpu
from replayssm.backends import torch as plain

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler on this machine")


@pytest.fixture(autouse=True)
def _nobody_chose_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYSSM_CPU", raising=False)


CORNERS = {
    "mamba2": MAMBA2,
    "gdn": GDN,
    "kda": KDA,
    "gla": Recurrence("gla", "channel", "add"),
    "deltanet": Recurrence("deltanet", "none", "delta"),
    "linear": Recurrence("linear", "none", "add"),
}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def lowered(layout: Layout, tokens: int) -> LinearInputs:
    h, g, p, k = layout.heads, layout.groups, layout.head_dim, layout.state_dim
    shape = {"head": (tokens, h), "channel": (tokens, h, k), "none": None}[layout.recurrence.decay]
    key = torch.nn.functional.normalize(torch.randn(tokens, g, k), dim=-1)
    return LinearInputs(
        torch.randn(tokens, g, k).to(layout.dtype),
        key.to(layout.dtype),
        torch.randn(tokens, h, p).to(layout.dtype),
        None if shape is None else -torch.rand(shape),
        torch.rand(tokens, h),
    )


def pair(layout: Layout, slots: int) -> tuple[ReplayCache, ReplayCache]:
    state = torch.randn(slots, layout.heads, layout.head_dim, layout.state_dim)
    caches = []
    for backend in (cpu, plain):
        cache = ReplayCache.allocate(layout, layers=2, slots=slots)
        assert cache.backend is cpu
        cache.backend = backend
        for layer in range(2):
            cache.load(layer, range(slots), state, phase=range(slots))
        caches.append(cache)
    return caches[0], caches[1]


def run(layout: Layout, steps: int, slots: int = 3, trees: bool = True) -> float:
    """Drive both caches through the same random steps; return the worst relative difference of outputs and states."""
    ours, theirs = pair(layout, slots)
    worst = 0.0
    for number in range(steps):
        rows_of = random.sample(range(slots), random.randint(1, slots))
        counts = [random.randint(0, layout.max_draft) for _ in rows_of]
        parents = [random.randint(-1, t - 1) for n in counts for t in range(n)] if trees and number % 2 else None
        rows = Rows.draft(rows_of, counts, parents)
        paths = []
        for r, n in enumerate(counts):
            start, node, line = sum(counts[:r]), random.randint(-1, n - 1), []
            while node >= 0:
                line.append(node)
                node = node - 1 if parents is None else parents[start + node]
            paths.append(line[::-1])
        for layer in range(2):
            inputs = lowered(layout, sum(counts) + 1)
            a, b = step(ours[layer], inputs, rows), step(theirs[layer], inputs, rows)
            assert not a[sum(counts) :].any()
            if b.numel():
                worst = max(worst, float((a.double() - b.double()).abs().max() / (1 + b.double().abs().max())))
        path = [line + [-1] * (layout.max_draft - len(line)) for line in paths]
        for cache in (ours, theirs):
            cache.commit(rows, [len(line) for line in paths], path=path)
        a, b = (cache.materialise(1, range(slots)) for cache in (ours, theirs))
        worst = max(worst, float((a - b).abs().max() / (1 + b.abs().max())))
    assert ours.length.tolist() == theirs.length.tolist()
    assert ours.folds.sum() > 0
    return worst


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("corner", CORNERS)
def test_equals_the_torch_backend(corner: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    random.seed(0)
    layout = Layout(CORNERS[corner], 4, 2, 6, 12, window=7, max_draft=4, dtype=dtype)
    assert run(layout, steps=16) < ROUNDING[dtype]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (6, 1, 5, 3), (8, 8, 16, 64), (2, 2, 80, 40)])
def test_every_shape(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    for recurrence in (GDN, KDA, MAMBA2):
        assert run(Layout(recurrence, *shape, window=5, max_draft=2, dtype=torch.float32), steps=8) < 5e-6


@pytest.mark.parametrize("checkpoint", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints(checkpoint: torch.dtype) -> None:
    torch.manual_seed(2)
    random.seed(2)
    policy = Precision(checkpoint=checkpoint, rounding="stochastic")
    layout = Layout(GDN, 4, 2, 8, 16, window=6, max_draft=2, dtype=torch.float32, precision=policy)
    # Equal random bits round equal values equally; a value near a threshold may still fall to the other side.
    assert run(layout, steps=10) < float(torch.finfo(checkpoint).eps) * 4


def test_read_copy_is_what_a_step_reads() -> None:
    layout = Layout(MAMBA2, 2, 1, 4, 8, dtype=torch.float32, precision=Precision(read_copy=torch.bfloat16))
    ours, theirs = pair(layout, 2)
    for cache in (ours, theirs):
        cache.views()[0]["read_copy"].zero_()
    inputs = lowered(layout, 2)
    a, b = (step(cache[0], inputs, Rows.decode([0, 1])) for cache in (ours, theirs))
    own = (inputs.q * inputs.k).sum(-1, keepdim=True) * inputs.beta[..., None] * inputs.v
    torch.testing.assert_close(a, own)
    torch.testing.assert_close(b, own)


def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layout = Layout(GDN, 8, 4, 16, 32, dtype=torch.float32)
    cache = ReplayCache.allocate(layout, layers=1, slots=9)
    cache.load(0, range(9), torch.randn(9, 8, 16, 32))
    inputs, rows = lowered(layout, 9), Rows.decode(range(9))
    alone = step(cache[0], inputs, rows)
    monkeypatch.setattr(cpu, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(step(cache[0], inputs, rows), alone)


def test_small_exponents() -> None:
    """Decay so strong that e^g underflows gives exactly the new token's part, never a denormal or NaN."""
    layout = Layout(Recurrence("head", "head", "add"), 1, 1, 4, 8, dtype=torch.float32)
    cache = ReplayCache.allocate(layout, layers=1, slots=1)
    cache.load(0, [0], torch.full((1, 1, 4, 8), 1e3))
    ones = torch.ones(1, 1, 8)
    inputs = LinearInputs(ones, ones, torch.ones(1, 1, 4), torch.full((1, 1), -500.0), torch.ones(1, 1))
    assert step(cache[0], inputs, Rows.decode([0])).tolist() == [[[8.0] * 4]]


def test_nan_in_one_row_stays_there() -> None:
    layout = Layout(GDN, 2, 2, 4, 8, dtype=torch.float32)
    cache = ReplayCache.allocate(layout, layers=1, slots=2)
    state = torch.randn(2, 2, 4, 8)
    state[0, 1, 2, 3] = float("nan")
    cache.load(0, [0, 1], state)
    out = step(cache[0], lowered(layout, 2), Rows.decode([0, 1]))
    assert out[0, 1].isnan().sum() == 1
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(("wish", "name"), [("torch", "torch"), ("c", "c"), ("", "c")])
def test_environment_chooses(wish: str, name: str) -> None:
    code = (
        "from replayssm import *; import torch;"
        "print(ReplayCache.allocate(Layout(GDN, 1, 1, 4, 4, dtype=torch.float32), layers=1, slots=1).backend.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "REPLAYSSM_CPU": wish},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == name


def test_without_a_compiler_torch_does_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    cpu.library.cache_clear()
    try:
        cache = ReplayCache.allocate(Layout(GDN, 1, 1, 4, 4, dtype=torch.float32), layers=1, slots=1)
        assert cache.backend is plain
    finally:
        cpu.library.cache_clear()


def test_float64_goes_to_torch() -> None:
    layout = Layout(GDN, 1, 1, 4, 4, dtype=torch.float64, precision=Precision(checkpoint=torch.float64))
    assert ReplayCache.allocate(layout, layers=1, slots=1).backend is plain


def test_inputs_of_an_unknown_class_say_what_is_taken() -> None:
    class Foreign:
        """Has what the protocol asks for and is none of the four classes."""

        def __init__(self, inner: LinearInputs) -> None:
            self.inner, self.tokens = inner, inner.tokens

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    layout = Layout(MAMBA2, 2, 1, 16, 16, window=4)
    inputs = lowered(layout, 1)
    cache = ReplayCache.allocate(layout, 1, 1)
    with pytest.raises(ReplayError, match=r"CPU kernels take .* got Foreign"):
        step(cache[0], Foreign(inputs), Rows.decode([0]))  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages to ask for")
def test_large_pages_are_advice_on_what_the_tensor_owns() -> None:
    small, large = torch.empty(5), torch.empty(3 << 20)
    assert cpu.large_pages(small) is small
    assert cpu.large_pages(large) is large
    assert cpu.large_pages(torch.empty(3 << 20, device="meta")).device.type == "meta"
    flags = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags")]
    assert any("hg" in line for line in flags)


def test_a_new_cache_holds_zeros() -> None:
    torch.full((16, 8, 64, 128), 7.0)  # memory that an allocation may get again
    cache = ReplayCache.allocate(Layout(GDN, 8, 4, 64, 128, dtype=torch.float32), layers=1, slots=16)
    assert not cache.materialise(0, range(16)).any()
