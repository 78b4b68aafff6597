"""Runs ``interpreted_walk.py`` where Triton interprets its kernels."""

from pathlib import Path

import pytest

from support.interpreter import run_interpreted


def test_walk_on_the_cpu() -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).parent / "interpreted_walk.py")
