"""Tests that need Triton's interpreter run in a process of their own: it is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(path: Path, *, select: str = "") -> None:
    """Run a file of tests with interpreted kernels and fail with its output."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REPLAYSSM_INTERPRET": "1", "PYTHONPATH": str(tests)}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(["-k", select] if select else [])]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
