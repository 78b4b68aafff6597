"""Which precision to take: the fastest by the traffic model, within a class of error that the user states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

from replayssm import checks
from replayssm.layout import Layout, Precision

from .gpus import Gpu
from .traffic import replay_step

ERROR_CLASSES = {"exact": "float32", "fine": "float32+bf16", "close": "float32+fp8", "coarse": "float32+nvfp4"}
"""Class -> its preset. The checkpoint is float32 in all of them, so the state is that of the float32 recurrence; the
class says how far a step's reads may be off: not at all, by 0.2 %, by 3 %, by 10 % of the state (docs/precision.md)."""
_WORTH = 0.05


@dataclass(frozen=True)
class Choice:
    """What ``choose_precision`` takes.

    Attributes:
        precision: the policy.
        error: the class of its reads, a key of ``ERROR_CLASSES``; it may be better than the one that was allowed.
        seconds: predicted time of the recurrent layers, per step, by class, of every class that was allowed.
    """

    precision: Precision
    error: str
    seconds: dict[str, float]


def choose_precision(
    layouts: Sequence[Layout], gpu: Gpu, batch: int, error: str = "close", acceptance: float = 1.0
) -> Choice:
    """The fastest policy whose reads are of an error class or better.

    A coarser class has to save 5 % of the time of the recurrent layers; at small batches, where launches are what takes
    time, the choice is float32.

    Args:
        layouts: of the recurrent layers, with window and drafts; their precision is what is being chosen.
        gpu: facts, from ``gpus()``.
        batch: sequences.
        error: the coarsest class that is allowed.
        acceptance: chance that a draft is accepted.

    Raises:
        ReplayError: an unknown class, or a batch below 1.
    """
    checks.one_of("error", error, tuple(ERROR_CLASSES))
    checks.integer("batch", batch, 1)
    names = list(ERROR_CLASSES)
    allowed = names[: names.index(error) + 1]
    seconds: dict[str, float] = {}
    best = allowed[0]
    for name in allowed:
        policy = Precision.preset(ERROR_CLASSES[name])
        traffic = (replay_step(replace(layout, precision=policy), acceptance) * batch for layout in layouts)
        seconds[name] = fsum(gpu.replay + gpu.seconds(moved) for moved in traffic)
        if seconds[name] < (1 - _WORTH) * seconds[best]:
            best = name
    return Choice(Precision.preset(ERROR_CLASSES[best]), best, seconds)
