"""Error over long sequences: the replay step and the conventional float32 step against the float64 recurrence."""

from __future__ import annotations

import torch

from replayssm import Layout, Precision, Recurrence, ReplayCache, Rows, step
from replayssm.bench.cases import random_inputs
from replayssm.bench.conventional import make_step
from replayssm.bench.timing import graph

DEVICE = "cuda"


def drift(recurrence: Recurrence, tokens: int, window: int = 32, policy: Precision | None = None) -> dict[str, float]:
    """Teacher-forced decode of two rows; relative output errors (root mean square over all tokens), float32 outputs.

    Inputs repeat every 64 windows. The oracle is the conventional kernel with a float64 state and float64 arithmetic.
    """
    layout = Layout(recurrence, 4, 4, 64, 128, window=window, dtype=torch.float32, precision=policy or Precision())
    cache = ReplayCache.allocate(layout, 1, 2, DEVICE)
    slots = torch.arange(2, dtype=torch.int32, device=DEVICE)
    rows, ones = Rows.decode(slots), torch.ones_like(slots)
    truth = torch.zeros((2, *layout.tensors["checkpoint"].shape), dtype=torch.float64, device=DEVICE)
    single = truth.float()
    exact, single_step = make_step(layout, 2, DEVICE, torch.float64), make_step(layout, 2, DEVICE)
    sums = torch.zeros(3, dtype=torch.float64, device=DEVICE)
    inputs = [random_inputs(layout, 2, DEVICE, n) for n in range(64)]

    def block() -> None:
        for part in inputs:
            got = step(cache[0], part, rows)
            cache.commit(rows, ones)
            want = exact(truth, part)
            usual = single_step(single, part)
            parts = (got.double() - want, usual.double() - want, want)
            sums.add_(torch.stack([(part**2).sum() for part in parts]))

    captured = graph(block, warm=1)
    sums.zero_()
    for _ in range(tokens // len(inputs)):
        captured.replay()
    cache.check()
    error, usual, scale = sums.tolist()
    return {"tokens": tokens, "error": (error / scale) ** 0.5, "error_conventional": (usual / scale) ** 0.5}
