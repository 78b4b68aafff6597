"""Random inputs for every recurrence, and the flavours of their gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from replayssm import (
    GDN,
    KDA,
    MAMBA2,
    GdnInputs,
    KdaInputs,
    Layout,
    LinearInputs,
    Mamba2Inputs,
    Precision,
    Recurrence,
    Rows,
)
from replayssm.inputs import Inputs

# Every corner of the table: three decays by two updates, the three named families first.
CORNERS = {
    "mamba2": MAMBA2,
    "gdn": GDN,
    "kda": KDA,
    "gla": Recurrence("gla", "channel", "add"),
    "retnet": Recurrence("retnet", "head", "add"),
    "deltanet": Recurrence("deltanet", "none", "delta"),
    "linear": Recurrence("linear", "none", "add"),
}
# Other gates of the same families.
FLAVOURS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-bare": ("mamba2", {"dt_bias": None}),
    "mamba2-limited": ("mamba2", {"dt_limit": (0.2, 0.9)}),
    "gdn-negative": ("gdn", {"allow_neg_eigval": True}),
    "kda-bounded": ("kda", {"lower_bound": -5.0}),
}
EVERY = (*CORNERS, *FLAVOURS)
DELTA = [name for name, corner in CORNERS.items() if corner.update == "delta"]
# Fields that belong to the layer and not to a token.
PARAMETERS = ("A", "A_log", "dt_bias")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layout_of(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Layout:
    """A small layout of a corner or flavour; float64 throughout unless told otherwise."""
    sizes: dict[str, Any] = {"heads": 4, "groups": 2, "head_dim": 3, "state_dim": 5, "window": 9, "max_draft": 4}
    sizes["precision"] = Precision(checkpoint=torch.float64 if dtype == torch.float64 else torch.float32)
    corner = CORNERS[FLAVOURS[name][0] if name in FLAVOURS else name]
    return Layout(corner, dtype=dtype, **{**sizes, **changes})


def random_inputs(name: str, layout: Layout, tokens: int, source: torch.Generator, decay: float = 1.0) -> Inputs:
    """``tokens`` random tokens of a corner or flavour; ``decay`` scales the log-decays."""
    family, options = FLAVOURS.get(name, (name, {}))
    h, g, p, k, n = layout.heads, layout.groups, layout.head_dim, layout.state_dim, tokens
    gate = layout.dtype if layout.dtype == torch.float64 else torch.float32

    def rand(*shape: int, dtype: torch.dtype = layout.dtype) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)

    def rate(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=source, dtype=torch.float64) * decay).to(gate)

    if family == "mamba2":
        parts: dict[str, Any] = {"A": -rate(h) - 0.1 * decay, "dt_bias": rand(h, dtype=gate), **options}
        scale = k**-0.5
        return Mamba2Inputs(rand(n, h, p), rand(n, h, dtype=gate), rand(n, g, k) * scale, rand(n, g, k), **parts)
    if family == "gdn":
        a_log = (rate(h) + 0.1 * decay).log()
        gates = rand(n, h, dtype=gate), rand(n, h, dtype=gate)
        return GdnInputs(rand(n, g, k), rand(n, g, k), rand(n, h, p), *gates, a_log, rand(h, dtype=gate), **options)
    if family == "kda":
        a_log, bias = (rate(h) + 0.1 * decay).log(), rand(h, k, dtype=gate)
        gates = rand(n, h, k, dtype=gate), rand(n, h, dtype=gate)
        return KdaInputs(rand(n, g, k), rand(n, g, k), rand(n, h, p), *gates, a_log, bias, **options)
    keys = rand(n, g, k)
    keys = keys / keys.double().norm(dim=-1, keepdim=True).clamp(min=1e-3).to(keys.dtype)
    log_decay = {"head": lambda: -rate(n, h), "channel": lambda: -rate(n, h, k), "none": lambda: None}
    beta = torch.rand(n, h, generator=source, dtype=torch.float64).to(gate)
    return LinearInputs(rand(n, g, k), keys, rand(n, h, p), log_decay[layout.recurrence.decay](), beta)


def map_tokens(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same record with ``change`` applied to every tensor that has a token dimension."""
    kept = {item.name: getattr(inputs, item.name) for item in fields(inputs)}  # type: ignore[arg-type]
    for name, value in kept.items():
        if isinstance(value, Tensor) and name not in PARAMETERS:
            kept[name] = change(value)
    return type(inputs)(**kept)


def take(inputs: Inputs, tokens: Sequence[int]) -> Inputs:
    """Some tokens, in this order."""
    index = torch.tensor(list(tokens), dtype=torch.int64)
    return map_tokens(inputs, lambda x: x[index.to(x.device)])


def spoil(inputs: Inputs, tokens: Sequence[int]) -> Inputs:
    """NaN in every tensor of some tokens."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[list(tokens)] = float("nan")
        return x

    return map_tokens(inputs, change)


def put(inputs: Inputs, device: str | torch.device) -> Inputs:
    """The same record on a device, parameters included."""
    kept = {item.name: getattr(inputs, item.name) for item in fields(inputs)}  # type: ignore[arg-type]
    return type(inputs)(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in kept.items()})


def random_state(layout: Layout, rows: int, source: torch.Generator) -> Tensor:
    """States [R, H, P, K] in float32, or float64 for such a layout."""
    shape = (rows, layout.heads, layout.head_dim, layout.state_dim)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(layout.wide)


def chain(rows: Rows, row: int) -> list[int]:
    """The places of a row's tokens among the inputs."""
    offsets = rows.offsets.tolist()
    return list(range(offsets[row], offsets[row + 1]))
