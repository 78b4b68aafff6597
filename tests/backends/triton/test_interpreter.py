"""Runs ``interpreted.py`` where Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_on_the_cpu() -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent
    tests = here.parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REPLAYSSM_INTERPRET": "1", "PYTHONPATH": str(tests)}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, str(here / "interpreted.py")]
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
