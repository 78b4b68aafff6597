"""State formats through Triton's interpreter, on the CPU. Run by ``test_interpreter`` in a process of its own."""

from __future__ import annotations

import pytest
from format_checks import NAMES, PRESETS, check_round_trip, check_walk, small, written

import support.interpreting  # noqa: F401
from replayssm import Precision, ReplayCache

# numpy warns where a NaN or an infinity is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FAMILIES = ["mamba2", "gdn", "kda"]
SMALL = {"heads": 1, "head_dim": 16, "window": 3}
# One of each kind; a GPU runs the others as well.
WALKS = [name for name in PRESETS if name not in ("float32", "bf16", "fp16", "int4sr", "fp8", "int8", "float32+fp16")]


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, stochastic: bool) -> None:
    for state_dim in (64,) if stochastic else (72,):
        check_round_trip(name, state_dim, stochastic, "cpu")


def pair(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: Precision, **sizes: int
) -> tuple[ReplayCache, ReplayCache]:
    """A cache of the kernels, and one of the host."""
    layout = small(name, policy, **sizes)
    kernels = ReplayCache.allocate(layout, 1, 3, seed=9)
    monkeypatch.delenv("REPLAYSSM_INTERPRET")
    return kernels, ReplayCache.allocate(layout, 1, 3, seed=9)


@pytest.mark.parametrize("number", range(len(WALKS)), ids=WALKS)
def test_walk(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, policy = FAMILIES[number % 3], Precision.preset(WALKS[number])
    check_walk(name, policy, pair(monkeypatch, name, policy, **SMALL), steps=2)


@pytest.mark.parametrize(
    ("name", "preset"), [("gdn", "float32+fp8"), ("gla", "float32+nvfp4"), ("deltanet", "int4"), ("kda", "fp16sr+int8")]
)
def test_verify(name: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Precision.preset(preset)
    check_walk(name, policy, pair(monkeypatch, name, policy, heads=1, window=6, max_draft=3), steps=2)


@pytest.mark.parametrize("draft", [1, 2])
@pytest.mark.parametrize("buffer", ["fp16", "bf16", "bf16x2", "fp16_scaled"])
def test_written_values(buffer: str, draft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = written(buffer)
    check_walk("gdn", policy, pair(monkeypatch, "gdn", policy, max_draft=draft, **SMALL), steps=2)
