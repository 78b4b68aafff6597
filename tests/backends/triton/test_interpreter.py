"""Runs the ``interpreted….py`` files where Triton interprets its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.interpreter import run_interpreted


@pytest.mark.parametrize("name", ["interpreted", "interpreted_formats"])
def test_kernels_on_the_cpu(name: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name(f"{name}.py"))
