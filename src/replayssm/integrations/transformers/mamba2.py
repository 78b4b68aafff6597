"""The Mamba-2 family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replayssm import MAMBA2, Mamba2Inputs, ReplayError

from .scan import Scan, refuse_packed


class Mamba2Scan(Scan):
    """Mamba-2. Tokens: x [B, T, H, P], dt [B, T, H], B, C [B, T, G, K]; stock states are [B, H, P, K] as ours."""

    recurrence = MAMBA2
    function = "mamba2_chunk_scan"

    def __init__(
        self,
        stock: Callable[..., Any],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: None = None,
        dt_bias: Tensor | None = None,
        initial_states: None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = True,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> None:
        """The stock function's arguments."""
        refuse_packed(seq_idx=seq_idx, cu_seqlens=cu_seqlens)
        if z is not None or not dt_softplus:
            raise ReplayError("this layer gates inside its scan: replayssm's Mamba-2 layers gate after it")
        self.tokens = (hidden_states, dt, B, C)
        self.stock, self.A, self.D, self.dt_bias = stock, A, D, dt_bias
        self.dt_limit = None if dt_limit in (None, (0.0, float("inf"))) else dt_limit
        self.options = {**options, "chunk_size": chunk_size}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """From x [B, T, H, P] and B [B, T, G, K]."""
        x, _, key, _ = self.tokens
        return x.shape[2], key.shape[2], x.shape[3], key.shape[3]

    def chunked(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``Scan.chunked``."""
        x, dt, B, C = self.tokens
        limit = {} if self.dt_limit is None else {"dt_limit": self.dt_limit}
        return self.stock(
            x,
            dt,
            self.A,
            B,
            C,
            D=self.D,
            dt_bias=self.dt_bias,
            initial_states=state,
            dt_softplus=True,
            return_final_states=True,
            **limit,
            **self.options,
        )

    def inputs(self) -> Mamba2Inputs:
        """See ``Scan.inputs``."""
        x, dt, B, C = (t.flatten(0, 1) for t in self.tokens)
        return Mamba2Inputs(x, dt, B, C, self.A, self.dt_bias, self.dt_limit)

    def finish(self, out: Tensor) -> Tensor:
        """Add ``D·x``."""
        if self.D is None:
            return out
        if self.D.dtype == out.dtype:
            return torch.addcmul(out, self.tokens[0], self.D[:, None])
        skip = self.D.float()[:, None] * self.tokens[0].float()
        return (out.float() + skip).to(out.dtype)

    def result(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and, in the place of the final state, nothing: the state is in the cache."""
        return out.contiguous(), torch.empty(0)
