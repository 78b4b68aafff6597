"""The delta-rule families: Gated DeltaNet and Kimi Delta Attention differ in the decay's shape and in names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from replayssm import GDN, KDA, LinearInputs, ReplayError

from .scan import Scan, refuse_packed


class GdnScan(Scan):
    """Gated DeltaNet. Tokens: q, k [B, T, G, K], v [B, T, H, P], g, β [B, T, H]; stock states are [B, H, K, P]."""

    recurrence = GDN
    function = "torch_chunk_gated_delta_rule"

    def __init__(
        self,
        stock: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: None = None,
        output_final_state: bool = True,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> None:
        """The stock function's arguments."""
        refuse_packed(cu_seqlens=cu_seqlens)
        if not use_qk_l2norm_in_kernel:
            raise ReplayError("this layer does not normalise q and k: replayssm's GDN and KDA layers do")
        self.tokens = (query, key, value, g, beta)
        self.stock, self.options = stock, options

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """From v [B, T, H, P] and k [B, T, G, K]."""
        _, key, value, *_ = self.tokens
        return value.shape[2], key.shape[2], value.shape[3], key.shape[3]

    def chunked(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``Scan.chunked``."""
        query, key, value, g, beta = self.tokens
        if key.shape[2] != value.shape[2]:  # some versions of the function take a key a value head
            query, key = (t.repeat_interleave(value.shape[2] // key.shape[2], 2) for t in (query, key))
        initial = None if state is None else state.transpose(-1, -2).contiguous()
        out, final = self.stock(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **self.options,
        )
        return out, self.from_stock(final)

    def from_stock(self, state: Tensor) -> Tensor:
        """[B, H, K, P] -> [B, H, P, K]."""
        return state.transpose(-1, -2)

    def inputs(self) -> LinearInputs:
        """See ``Scan.inputs``. The models compute g and β themselves, some with a factor two or a bound."""
        return LinearInputs(*(t.flatten(0, 1) for t in self.tokens), unit=True)

    def result(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and, in the place of the final state, nothing: the state is in the cache."""
        return out, out.new_empty(0)


class KdaScan(GdnScan):
    """Kimi Delta Attention: g is [B, T, H, K]."""

    recurrence = KDA
    function = "chunk_kimi_delta_attention"
