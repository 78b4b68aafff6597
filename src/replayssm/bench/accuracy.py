"""How far a case's outputs and states are from the float64 recurrence, beside the conventional float32 step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from replayssm.bench.cases import Case, random_inputs, take
from replayssm.bench.conventional import make_step
from replayssm.cache import ReplayCache
from replayssm.ops import step
from replayssm.rows import Rows


def errors(case: Case, device: str, rows: int = 2, windows: int = 3) -> dict[str, float]:
    """Relative errors (root of summed squares over that of the truth) over three windows from a zero state.

    ``error`` is that of the state after them, ``error_output`` that of all accepted tokens' outputs, which are rounded
    to bfloat16; ``…_conventional`` are those of the conventional step on a float32 state.
    """
    small = replace(case, batch=rows)
    layout = small.layout
    cache = ReplayCache.allocate(layout, 1, rows, device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    batch, accepted = Rows.draft(slots, torch.full_like(slots, small.draft)), torch.full_like(slots, small.accepted)
    truth = torch.zeros((rows, *layout.state_shape), dtype=torch.float64, device=device)
    single = truth.float()
    exact, usual = make_step(layout, rows, device, torch.float64), make_step(layout, rows, device)
    first = torch.arange(rows, device=device) * small.draft
    squares = torch.zeros(3, dtype=torch.float64, device=device)
    for number in range(windows * layout.window // small.accepted):
        inputs = random_inputs(layout, rows * small.draft, device, 100 + number)
        out = step(cache[0], inputs, batch)
        for t in range(small.accepted):
            token = take(inputs, first + t)
            want = exact(truth, token)
            squares += _squares(out[first + t] - want, usual(single, token) - want, want)
        cache.commit(batch, accepted)
    got = cache.materialise(0, range(rows))
    state = _squares(got - truth, single - truth, truth)
    return {
        "error": _root(state[0], state[2]),
        "error_conventional": _root(state[1], state[2]),
        "error_output": _root(squares[0], squares[2]),
        "error_output_conventional": _root(squares[1], squares[2]),
    }


def _squares(*differences: Tensor) -> Tensor:
    return torch.stack([difference.double().square().sum() for difference in differences])


def _root(square: Tensor, scale: Tensor) -> float:
    return float((square / scale).sqrt())
