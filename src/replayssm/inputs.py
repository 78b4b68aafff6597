"""What a model hands to ``step``, and the gates that lower it to the one recurrence.

Each family has its own record, with the letters of its paper. ``lower`` turns it into ``q, k, v, g, β`` of

    S ← S·Diag(exp g) ;  u = β v  or  β (v − S k) ;  S ← S + u kᵀ ;  o = S q

Gates are computed in float32 whatever the activations are. There is one function a gate, used by the step and,
through what it buffers, by the fold: a second formula for the same gate would make the state drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import checks
from replayssm.checks import ReplayError
from replayssm.layout import Layout

L2_EPSILON = 1e-6


class Lowered(NamedTuple):
    """N tokens in the letters of the one recurrence. ``wide`` is float32 (float64 for float64 activations).

    Attributes:
        q: [N, G, K] wide, normalised and scaled.
        k: [N, G, K] activation dtype, as the caller gave it.
        v: [N, H, P] activation dtype.
        g: [N, H] or [N, H, K] wide, log-decay ≤ 0; None where nothing decays.
        beta: [N, H] wide, the write weight.
        key_scale: [N, G] wide; the key that is used is ``k · key_scale``. None where k is used as it is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    key_scale: Tensor | None


class Inputs(Protocol):
    """Inputs of one step: N tokens, all rows one after the other."""

    @property
    def tokens(self) -> int:
        """N."""
        ...

    def check(self, layout: Layout, device: torch.device) -> None:
        """Raise ``ReplayError`` unless every tensor fits the layout."""
        ...

    def gates(self, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """g and β, as ``Lowered`` has them."""
        ...

    def lower(self, layout: Layout) -> Lowered:
        """Apply the gates."""
        ...


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp x), the identity above 20."""
    return F.softplus(x, threshold=20.0)


def l2_scale(x: Tensor, wide: torch.dtype) -> Tensor:
    """rsqrt(Σ x² + 1e-6) over the last dimension, in ``wide``."""
    return torch.rsqrt(x.to(wide).square().sum(-1) + L2_EPSILON)


@dataclass(frozen=True, eq=False)
class Mamba2Inputs:
    """Mamba-2 (SSD), after the convolution. ``D·x`` and the gate ``z`` stay with the model.

    Attributes:
        x: [N, H, P] values.
        dt: [N, H] raw step size; ``softplus(dt + dt_bias)`` is taken here.
        B: [N, G, K] keys.
        C: [N, G, K] queries.
        A: [H] negative decay rates, ``-exp(A_log)``.
        dt_bias: [H] or None.
        dt_limit: (low, high) to which the step size is clamped after softplus; None where the model has no limit.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    dt_bias: Tensor | None = None
    dt_limit: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        """N."""
        return self.x.shape[0]

    def check(self, layout: Layout, device: torch.device) -> None:
        """Raise ``ReplayError`` unless the tensors fit a layout with decay "head" and update "add"."""
        _family(self, layout, decay="head", update="add")
        dims = _Dims(layout, self.x)
        _activations(self, layout, {"x": dims.value, "B": dims.key, "C": dims.key})
        _gates(self, layout, {"dt": dims.head})
        _parameters(self, layout, {"A": dims.head[1:], "dt_bias": dims.head[1:]}, optional=("dt_bias",))
        _devices(self, device)
        if self.A.device.type == "cpu" and bool((self.A > 0).any()):
            raise ReplayError(f"A: expected negative rates, −exp(A_log), got {float(self.A.max()):.4g}")
        if self.dt_limit is not None and not (len(self.dt_limit) == 2 and 0 <= self.dt_limit[0] <= self.dt_limit[1]):
            raise ReplayError(f"dt_limit: expected (low, high) with 0 ≤ low ≤ high, got {self.dt_limit!r}")

    def gates(self, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """dt = softplus(dt + dt_bias); g = A·dt; β = dt."""
        wide = layout.wide
        dt = self.dt.to(wide)
        if self.dt_bias is not None:
            dt = dt + self.dt_bias.to(wide)
        dt = softplus(dt)
        if self.dt_limit is not None:
            dt = dt.clamp(*self.dt_limit)
        return self.A.to(wide) * dt, dt

    def lower(self, layout: Layout) -> Lowered:
        """Widen C; apply the gates."""
        return Lowered(self.C.to(layout.wide), self.B, self.x, *self.gates(layout), None)


@dataclass(frozen=True, eq=False)
class GdnInputs:
    """Gated DeltaNet, after the convolution. q and k are l2-normalised here and q is scaled by K^-½.

    Attributes:
        q: [N, G, K] queries.
        k: [N, G, K] keys.
        v: [N, H, P] values.
        a: [N, H] raw decay gate: ``g = −exp(A_log)·softplus(a + dt_bias)``.
        b: [N, H] raw write gate: ``β = σ(b)``.
        A_log: [H].
        dt_bias: [H].
        allow_neg_eigval: β = 2σ(b), which lets the state's transition have negative eigenvalues (olmo_hybrid).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    allow_neg_eigval: bool = False

    @property
    def tokens(self) -> int:
        """N."""
        return self.v.shape[0]

    def check(self, layout: Layout, device: torch.device) -> None:
        """Raise ``ReplayError`` unless the tensors fit a layout with decay "head" and update "delta"."""
        _family(self, layout, decay="head", update="delta")
        dims = _Dims(layout, self.v)
        _activations(self, layout, {"q": dims.key, "k": dims.key, "v": dims.value})
        _gates(self, layout, {"a": dims.head, "b": dims.head})
        _parameters(self, layout, {"A_log": dims.head[1:], "dt_bias": dims.head[1:]})
        _devices(self, device)

    def gates(self, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """Those of the class docstring."""
        wide = layout.wide
        g = -self.A_log.to(wide).exp() * softplus(self.a.to(wide) + self.dt_bias.to(wide))
        return g, torch.sigmoid(self.b.to(wide)) * (2.0 if self.allow_neg_eigval else 1.0)

    def lower(self, layout: Layout) -> Lowered:
        """Normalise q and k; apply the gates."""
        return _lower_delta(self.q, self.k, self.v, *self.gates(layout), layout)


@dataclass(frozen=True, eq=False)
class KdaInputs:
    """Kimi Delta Attention, after the convolutions: GDN with a decay per channel of the key.

    Attributes:
        q: [N, G, K] queries.
        k: [N, G, K] keys.
        v: [N, H, P] values.
        a: [N, H, K] raw decay gate: ``g = −exp(A_log)·softplus(a + dt_bias)``.
        b: [N, H] raw write gate: ``β = σ(b)``.
        A_log: [H].
        dt_bias: [H, K].
        lower_bound: with a bound (such as −5.0) the gate is ``g = lower_bound·σ(exp(A_log)·(a + dt_bias))``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None

    @property
    def tokens(self) -> int:
        """N."""
        return self.v.shape[0]

    def check(self, layout: Layout, device: torch.device) -> None:
        """Raise ``ReplayError`` unless the tensors fit a layout with decay "channel" and update "delta"."""
        _family(self, layout, decay="channel", update="delta")
        dims = _Dims(layout, self.v)
        _activations(self, layout, {"q": dims.key, "k": dims.key, "v": dims.value})
        _gates(self, layout, {"a": dims.channel, "b": dims.head})
        _parameters(self, layout, {"A_log": dims.head[1:], "dt_bias": dims.channel[1:]})
        _devices(self, device)
        if self.lower_bound is not None and not self.lower_bound < 0:
            raise ReplayError(f"lower_bound: expected a negative number or None, got {self.lower_bound}")

    def gates(self, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """Those of the class docstring."""
        wide = layout.wide
        rate = self.A_log.to(wide).exp()[:, None]
        a = self.a.to(wide) + self.dt_bias.to(wide)
        g = -rate * softplus(a) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * a)
        return g, torch.sigmoid(self.b.to(wide))

    def lower(self, layout: Layout) -> Lowered:
        """Normalise q and k; apply the gates."""
        return _lower_delta(self.q, self.k, self.v, *self.gates(layout), layout)


@dataclass(frozen=True, eq=False)
class LinearInputs:
    """Already lowered inputs, for any recurrence of the table: GLA, RetNet, lightning attention, DeltaNet, new ones.

    Attributes:
        q: [N, G, K] queries, scaled as the model wants them.
        k: [N, G, K] keys, normalised if the model normalises.
        v: [N, H, P] values.
        g: log-decay ≤ 0: [N, H] for decay "head", [N, H, K] for "channel", None for "none".
        beta: [N, H] write weight; None means 1.
        unit: q and k are raw: they are l2-normalised here, and q is scaled by K^-½, as GDN and KDA do. For models that
            compute g and β themselves.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    unit: bool = False

    @property
    def tokens(self) -> int:
        """N."""
        return self.v.shape[0]

    def check(self, layout: Layout, device: torch.device) -> None:
        """Raise ``ReplayError`` unless the tensors fit the layout."""
        dims = _Dims(layout, self.v)
        _activations(self, layout, {"q": dims.key, "k": dims.key, "v": dims.value})
        decay = layout.recurrence.decay
        if decay == "none":
            if self.g is not None:
                raise ReplayError(f"g: {layout.recurrence.title} has decay 'none', expected None")
        elif self.g is None:
            raise ReplayError(f"g: {layout.recurrence.title} has decay {decay!r}, expected its log-decay, got None")
        else:
            _gates(self, layout, {"g": dims.channel if decay == "channel" else dims.head})
        if self.beta is not None:
            _gates(self, layout, {"beta": dims.head})
        if self.unit and layout.recurrence.update != "delta":
            raise ReplayError(f"unit: only the delta rule keeps its keys' scales, and {layout.recurrence.title} adds")
        _devices(self, device)

    def gates(self, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """As given; β is 1 where there is none."""
        wide = layout.wide
        beta = self.v.new_ones(self.v.shape[:2], dtype=wide) if self.beta is None else self.beta.to(wide)
        return None if self.g is None else self.g.to(wide), beta

    def lower(self, layout: Layout) -> Lowered:
        """Widen, and normalise where ``unit`` says so."""
        g, beta = self.gates(layout)
        if self.unit:
            return _lower_delta(self.q, self.k, self.v, g, beta, layout)
        scale = None
        if layout.recurrence.update == "delta":
            scale = self.k.new_ones(self.k.shape[:2], dtype=layout.wide)
        return Lowered(self.q.to(layout.wide), self.k, self.v, g, beta, scale)


def _lower_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, layout: Layout) -> Lowered:
    """Normalise q and k, scale q by K^-½; the key itself is kept as it came."""
    wide = layout.wide
    q_scale = l2_scale(q, wide) * layout.state_dim**-0.5
    return Lowered(q.to(wide) * q_scale[..., None], k, v, g, beta, l2_scale(k, wide))


class _Dims:
    """The labelled dimensions that the inputs of a layout have."""

    def __init__(self, layout: Layout, first: object) -> None:
        tokens = first.shape[0] if isinstance(first, Tensor) and first.ndim else None
        n, h, k = ("N", tokens), ("heads", layout.heads), ("state_dim", layout.state_dim)
        self.value: Sequence[tuple[str, int | None]] = (("N", None), h, ("head_dim", layout.head_dim))
        self.key: Sequence[tuple[str, int | None]] = (n, ("groups", layout.groups), k)
        self.head: Sequence[tuple[str, int | None]] = (n, h)
        self.channel: Sequence[tuple[str, int | None]] = (n, h, k)


def _family(inputs: object, layout: Layout, decay: str, update: str) -> None:
    recurrence = layout.recurrence
    if (recurrence.decay, recurrence.update) != (decay, update):
        raise ReplayError(
            f"inputs: {type(inputs).__name__} needs decay={decay!r}, update={update!r}, but the layout is "
            f"{recurrence.title} with decay={recurrence.decay!r}, update={recurrence.update!r}"
        )


def _activations(inputs: object, layout: Layout, wanted: dict[str, Sequence[tuple[str, int | None]]]) -> None:
    for name, dims in wanted.items():
        tensor = getattr(inputs, name)
        checks.shape(name, tensor, dims, layout)
        checks.dtype(name, tensor, (layout.dtype,))


def _gates(inputs: object, layout: Layout, wanted: dict[str, Sequence[tuple[str, int | None]]]) -> None:
    for name, dims in wanted.items():
        tensor = getattr(inputs, name)
        checks.shape(name, tensor, dims, layout)
        checks.dtype(name, tensor, (layout.dtype, torch.float32))


def _parameters(
    inputs: object, layout: Layout, wanted: dict[str, Sequence[tuple[str, int | None]]], optional: Sequence[str] = ()
) -> None:
    for name in optional:
        if getattr(inputs, name) is None:
            wanted = {key: dims for key, dims in wanted.items() if key != name}
    _gates(inputs, layout, wanted)


def _devices(inputs: object, device: torch.device) -> None:
    for item in fields(inputs):  # type: ignore[arg-type]
        tensor = getattr(inputs, item.name)
        if isinstance(tensor, Tensor):
            checks.device(item.name, tensor, device)
