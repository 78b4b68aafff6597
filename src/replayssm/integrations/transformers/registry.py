"""Which modules of a model have a recurrence, and which of these are replayed."""

from __future__ import annotations

import inspect
from functools import cache as once

from torch import nn

from replayssm import ReplayError

from .delta import GdnScan, KdaScan
from .mamba2 import Mamba2Scan
from .scan import Scan

# A mixer belongs to a family by the function that it calls: the modeling files of a family all call the same one.
FAMILIES: tuple[type[Scan], ...] = (Mamba2Scan, GdnScan, KdaScan)

SUPPORTED = (
    "Mamba-2 (mamba2, nemotron_h, bamba, falcon_h1, granitemoehybrid, zamba2), Gated DeltaNet (qwen3_next, qwen3_5, "
    "qwen3_5_moe, qwen4_exp, olmo_hybrid, lara_mini) and Kimi Delta Attention (kimi_linear, bailing_hybrid, glm5_next)"
)

# Mixers of other recurrences, by a part of their class name.
_OTHERS = {
    "MambaMixer": "Mamba-1",
    "LightningAttention": "lightning attention",
    "Rglru": "RG-LRU",
    "RwkvSelfAttention": "RWKV",
    "xLSTMLayer": "xLSTM",
}


def find_mixers(model: nn.Module, required: bool = True) -> list[tuple[nn.Module, type[Scan]]]:
    """The mixers that can be replayed and their families, in the model's order.

    Args:
        model: of transformers.
        required: whether a model without recurrent layers is an error.

    Raises:
        ReplayError: the model has none although they are required, or some with another recurrence.
    """
    modules = list(model.modules())
    mixers = [(m, family) for m in modules if (family := _family(type(m))) is not None]
    others = {f"{type(m).__name__} ({name})" for m in modules if (name := _other(type(m))) is not None}
    if others:
        raise ReplayError(
            f"{type(model).__name__}: cannot replay {', '.join(sorted(others))}; supported recurrences: {SUPPORTED}"
        )
    if required and not mixers:
        raise ReplayError(f"{type(model).__name__}: has no recurrent layers; supported recurrences: {SUPPORTED}")
    return mixers


def _names(module: type) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(getattr(module, "forward", object)), "__code__", None)
    return () if code is None else code.co_names


@once
def _family(module: type) -> type[Scan] | None:
    return next((family for family in FAMILIES if family.function in _names(module)), None)


@once
def _other(module: type) -> str | None:
    """The recurrence of a mixer that is not replayed; None for all other modules."""
    if _family(module) is not None:
        return None
    named = next((title for part, title in _OTHERS.items() if part in module.__name__), None)
    return named or ("an unknown recurrence" if "update_recurrent_state" in _names(module) else None)
