"""Norms and MLPs of every type, as kernels and as they are: interpreted, or on a CUDA device where there is one."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_tiny import SERVED, tiny
from torch import nn

import support.interpreting  # noqa: F401
from replayssm.engine.binding import unbind
from replayssm.engine.fuse import fuse
from replayssm.engine.packed import running

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def is_norm(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__ and getattr(module, "weight", None) is not None


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])])
@pytest.mark.parametrize("name", SERVED)
def test_norms_and_mlps_of_every_type(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny(name)[0]).to(DEVICE, dtype)
    source = torch.Generator().manual_seed(1)
    norms = [module for module in model.modules() if is_norm(module)]
    with torch.no_grad():
        for module in norms:
            module.weight.copy_(torch.randn(module.weight.shape, generator=source))
    fused = fuse(model)
    assert norms
    assert {type(m).stock.__name__ for m in norms if m in fused} == {  # type: ignore[attr-defined]
        getattr(type(m), "stock", type(m)).__name__ for m in norms
    }
    running.view = object()  # type: ignore[assignment]
    try:
        for module in fused:
            stock = type(module).stock  # type: ignore[attr-defined]
            if is_norm(module):
                width = len(module.weight)
                given = [torch.randn(1, 5, width, generator=source).to(DEVICE, dtype)]
                if "Gated" in stock.__name__:
                    # A part of a projection, as mixers hand it over.
                    given.append(
                        torch.randn(1, 5, 3 * width, generator=source).to(DEVICE, dtype)[..., width : 2 * width]
                    )
            else:
                given = [torch.randn(1, 5, module.gate_proj.in_features, generator=source).to(DEVICE, dtype)]
            got, wanted = module(*given), stock.forward(module, *given)
            assert got.shape == wanted.shape
            digit = torch.finfo(dtype).eps
            torch.testing.assert_close(got, wanted, rtol=4 * digit, atol=4 * digit)
    finally:
        running.view = None
    unbind(fused)
    assert not any(hasattr(type(module), "stock") for module in model.modules())


def test_a_norm_that_is_another_one_stays() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.eps)

    assert fuse(nn.ModuleList([OddRMSNorm()])) == []
