"""The C kernels' formats: the same bits as ``replayssm.formats`` writes, and reads equal to the torch backend's."""

from __future__ import annotations

import pytest
import torch

from replayssm import GDN, KDA, MAMBA2, Layout, Precision, ReplayCache, Rows, step
from replayssm.backends import cpu
from replayssm.backends import torch as plain
from replayssm.formats import BUFFERS, FORMATS
from replayssm.precision import write
from support.caches import decode
from support.makers import generator, layout_of, random_inputs
from support.poison import same

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler on this machine")

NARROW = [name for name in FORMATS if name not in ("fp64", "fp32")]
SEED = 11


def edges(layout: Layout) -> torch.Tensor:
    """States [4, H, P, K] with rows of everything: zeros, denormals, huge, tiny, wide ranges, NaN and infinities."""
    source = generator(0)
    state = torch.randn(4, *layout.state_shape, generator=source)
    state[1] *= torch.exp(8 * torch.randn(state[1].shape, generator=source))
    state[2] *= torch.logspace(-44, 38, layout.head_dim)[:, None]
    state[2, :, 3] = 0
    state[2, :, 4, ::2] = -0.0
    state[3, 0, 1, 2], state[3, 1, 2, 1], state[3, 1, 3, 0] = float("nan"), float("inf"), -float("inf")
    state[3, 2] = 0
    return state


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("checkpoint", NARROW)
@pytest.mark.parametrize("state_dim", [5, 96])
def test_a_fold_writes_what_the_formats_write(checkpoint: str, rounding: str, state_dim: int) -> None:
    """For checkpoint and read copy, to the bit; a float32 state is what the same kernel materialises."""
    policy = Precision(checkpoint, "nvfp4" if checkpoint != "nvfp4" else "int8", rounding=rounding)  # type: ignore
    layout = layout_of("gdn", torch.float32, head_dim=10, state_dim=state_dim, precision=policy)
    cache = ReplayCache.allocate(layout, 1, 4, seed=SEED)
    assert cache.backend is cpu
    cache.load(0, range(4), edges(layout))
    decode(cache, "gdn", 3)
    state = cache.materialise(0, range(4))
    cache.fold(range(4))
    wanted = write(state, policy, SEED, 0, torch.ones(4, dtype=torch.int32))
    for name, part in wanted.items():
        got = cache.views()[0][name]
        if part.dtype in (torch.bfloat16, torch.float16):  # NaN has many codes there
            got, part = got.nan_to_num(1.5), part.nan_to_num(1.5)
        assert same(got, part), name


@pytest.mark.parametrize("recurrence", [MAMBA2, GDN, KDA], ids=lambda r: r.name)
@pytest.mark.parametrize("state_dim", [5, 64])
@pytest.mark.parametrize("copy", NARROW)
def test_a_step_reads_what_the_torch_backend_reads(copy: str, state_dim: int, recurrence) -> None:
    for policy in (Precision(read_copy=copy), Precision(copy)):
        layout = layout_of(
            recurrence.name, torch.float32, head_dim=10, state_dim=state_dim, window=9, max_draft=3, precision=policy
        )
        outs = []
        for backend in (cpu, plain):
            cache = ReplayCache.allocate(layout, 1, 3)
            cache.backend = backend
            cache.load(0, range(3), torch.randn(3, *layout.state_shape, generator=generator(1)))
            source = generator(2)
            for _ in range(3):
                rows = Rows.draft([2, 0, 1], [3, 1, 2], [-1, 0, 0, -1, -1, 0])
                outs.append(step(cache[0], random_inputs(recurrence.name, layout, 6, source), rows))
                cache.commit(rows, [1, 0, 2], path=[[0, -1], [-1, -1], [0, 1]])
            assert not cache.folds.any()  # folds of two backends may fall to different codes
        for ours, theirs in zip(outs[:3], outs[3:], strict=True):
            assert (ours - theirs).abs().max() < 5e-6 * (1 + theirs.abs().max())


@pytest.mark.parametrize("buffer", [name for name in BUFFERS if name != "fp64"])
def test_written_values_in_every_format(buffer: str) -> None:
    layout = layout_of("gdn", torch.float32, head_dim=10, state_dim=16, precision=Precision(buffer=buffer))
    views = []
    for backend in (cpu, plain):
        cache = ReplayCache.allocate(layout, 1, 4)
        cache.backend = backend
        cache.load(0, range(4), torch.randn(4, *layout.state_shape, generator=generator(1)))
        decode(cache, "gdn", 4)
        inputs = random_inputs("gdn", layout, 4, generator(3))
        views.append((step(cache[0], inputs, Rows.decode(range(4))), cache.views()[0], cache.materialise(0, range(4))))
    (ours, left, state), (theirs, right, other) = views
    limit = {"bf16": 1e-2, "fp16": 1e-3, "fp16_scaled": 1e-3}.get(buffer, 1e-5)
    assert (ours - theirs).abs().max() < limit
    assert (state - other).abs().max() < 1e-5
    for name in (name for name in left if name.startswith("written")):
        if name != "written_low":
            assert (left[name][:, :, :5].float() - right[name][:, :, :5].float()).abs().max() < limit * 2**15
