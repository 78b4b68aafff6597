"""Runs ``interpreted_attention.py`` where Triton interprets its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.interpreter import run_interpreted


def test_attention_on_the_cpu() -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted_attention.py"))
