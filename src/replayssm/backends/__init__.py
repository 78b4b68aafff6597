"""Where the arithmetic runs: one module a backend, all with the same functions."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from replayssm.backends import cpu, torch
from replayssm.checks import ReplayError
from replayssm.layout import Layout

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Cache, Kernels


def pick(layout: Layout, layers: list[dict[str, Tensor]]) -> ModuleType:
    """The backend of a cache: C on the CPU where a compiler exists, torch otherwise; the results are the same.

    The environment variable REPLAYSSM_CPU=torch (or c) chooses by hand.
    """
    wish = os.environ.get("REPLAYSSM_CPU", "")
    if wish not in ("", "c", "torch"):
        raise ReplayError(f"REPLAYSSM_CPU: got {wish!r}, supported: 'c', 'torch' or unset")
    on_cpu = layers[0]["checkpoint"].device.type == "cpu"
    if on_cpu and wish != "torch" and cpu.supports(layout, layers):
        return cpu
    if wish == "c":
        raise ReplayError(
            "REPLAYSSM_CPU=c, but there is no C compiler, or the layout is not covered (float64, strided)"
        )
    return torch


def kernels(cache: Cache) -> Kernels | None:
    """The verbs as Triton kernels for a cache on a CUDA device, else None."""
    if cache.device.type != "cuda" and not os.environ.get("REPLAYSSM_INTERPRET"):
        return None
    from replayssm.backends.triton.launch import Kernels

    return Kernels(cache)
