"""Norms and gated MLPs of a model as one kernel each, for forwards on a GPU.

Models write the same few formulas in a dozen ways. So none is known by name: a module is tried with random numbers,
and what a kernel reproduces takes it; everything else stays as it is.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .packed import running

if TYPE_CHECKING:
    from replayssm.backends.triton.norm import Norm

# Rows that a module is tried with.
_TRIED = 8


@torch.no_grad()
def fuse(model: nn.Module) -> list[nn.Module]:
    """Redirect the norms and MLPs that kernels reproduce; returns them. ``unbind`` makes them stock again."""
    found, known = [], {}
    for module in model.modules():
        key = _key(module)
        if key is None:
            continue
        if key not in known:
            known[key] = _fused(module)
        if known[key] is not None:
            module.__class__ = known[key]
            found.append(module)
    return found


def _key(module: nn.Module) -> tuple[Any, ...] | None:
    """What modules have in common that are fused alike; None for those that never are."""
    weight = getattr(module, "weight", None)
    if "RMSNorm" in type(module).__name__ and isinstance(weight, Tensor) and weight.ndim == 1:
        return type(module), len(weight), weight.dtype, _eps(module), getattr(module, "group_size", None)
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return type(module), module.gate_proj.weight.shape, module.gate_proj.weight.dtype  # type: ignore[union-attr]
    return None


def _fused(module: nn.Module) -> type[nn.Module] | None:
    forward = _norm_forward(module) if hasattr(module, "weight") else _mlp_forward(module)
    if forward is None:
        return None
    stock = type(module)
    inner = stock.forward

    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if running.view is None or kwargs:
            return inner(self, *args, **kwargs)
        return forward(self, *args)

    return type(f"Fused{stock.__name__}", (stock,), {"forward": chosen, "stock": stock, "__module__": __name__})


def _norm_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    from replayssm.backends.triton.norm import norm

    eps, weight = _eps(module), module.weight
    assert isinstance(weight, Tensor)
    if eps is None:
        return None
    gated = len(inspect.signature(module.forward).parameters) == 2
    source = torch.Generator(weight.device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device=weight.device).to(weight.dtype)

    x, tried = rand(_TRIED, len(weight)), rand(len(weight))
    given = (x, rand(_TRIED, len(weight))) if gated else (x,)
    wanted = functional_call(module, {"weight": tried}, given)
    for kind in _kinds(module, len(weight), eps, gated):
        if _same(norm(x, tried, kind, *given[1:]), wanted):
            return lambda self, x, *gate: norm(x, self.weight, kind, *gate)
    return None


def _kinds(module: nn.Module, width: int, eps: float, gated: bool) -> Iterator[Norm]:
    """Every norm that there is."""
    from replayssm.backends.triton.norm import Norm

    sizes = dict.fromkeys((width, getattr(module, "group_size", width), width // getattr(module, "n_groups", 1)))
    gates = (("before", "silu"), ("after", "silu"), ("after", "sigmoid")) if gated else (("none", "silu"),)
    for size, early, offset, (gate, act) in itertools.product(sizes, (True, False), (False, True), gates):
        if width % size == 0:
            yield Norm(size, eps, offset, early, gate, act)


def _mlp_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    from replayssm.backends.triton.norm import gated

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))

    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight: Tensor = module.gate_proj.weight  # type: ignore[union-attr, assignment]
    source = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn((_TRIED, weight.shape[1]), generator=source, device=weight.device).to(weight.dtype)
    return forward if _same(forward(module, x), module(x)) else None


def _same(got: Tensor, wanted: Any) -> bool:
    """Equal but for sums in another order: few numbers differ, and by a last digit."""
    if not isinstance(wanted, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if got.dtype == torch.float32:
        return torch.allclose(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    digit = torch.finfo(got.dtype).eps
    apart = (got.float() - wanted.float()).abs()
    close = apart <= 2 * digit * wanted.float().abs() + digit * float(wanted.abs().mean())
    return bool(close.all()) and float((apart > 0).float().mean()) < 0.1


def _eps(module: nn.Module) -> float | None:
    """The number beside the mean square."""
    names = ("eps", "variance_epsilon")
    return next((value for name in names if isinstance(value := getattr(module, name, None), float)), None)
