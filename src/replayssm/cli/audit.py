"""The state of each layer against the oracle: the buffer's raw inputs, run token by token in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import ReplayCache
from replayssm.inputs import LinearInputs
from replayssm.layout import Layout, Precision
from replayssm.reference import token_loop

from .ledger import pools


class StateAudit:
    """Watches plain decoding of one sequence while it is a context manager's value.

    The oracle starts from the state after the prompt, which stock's own scan made, and takes every later token's raw
    inputs from the buffer before a fold can drop them. So all folds of the run lie between it and the state compared.
    """

    def __init__(self, model: Any) -> None:
        """Watch this model."""
        self._model = model
        self._cache: Any = None
        self._oracle: dict[tuple[int, int], Tensor] = {}  # (pool, layer) -> [H, P, K] in float64
        self._held: dict[tuple[int, int], LinearInputs] = {}  # inputs of the last forward, not committed yet

    def __enter__(self) -> StateAudit:
        self._hook = self._model.register_forward_hook(self._after, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tokens = kwargs["input_ids"].shape[1]
        self._cache, found = pools(output)
        for number, pool in enumerate(found):
            cache: ReplayCache = pool.cache
            views, length, exact = cache.views(), int(cache.length[0]), _exact(cache.layout)
            for layer in range(cache.layers):
                key = number, layer
                state = self._oracle.get(key)
                if tokens > cache.layout.max_draft or state is None:
                    self._oracle[key] = cache.materialise(layer, [0])[0].double()
                if tokens > cache.layout.max_draft:
                    continue
                if key in self._held:
                    self._oracle[key] = token_loop(exact, self._held[key], self._oracle[key])[1][-1]
                self._held[key] = _inputs(views[layer], slice(length, length + tokens))

    def errors(self) -> list[dict[str, Any]]:
        """For each recurrent layer: its place in the model, its recurrence, and the state's largest relative error."""
        _, found = pools({"cache": self._cache})
        rows = []
        for number, pool in enumerate(found):
            for layer, place in enumerate(pool.layers):
                exact = self._oracle[number, layer]
                error = (pool.cache.materialise(layer, [0])[0].double() - exact).abs().max() / exact.abs().max()
                index = next(i for i, each in enumerate(self._cache.layers) if each is place)
                rows.append(
                    {
                        "layer": index,
                        "recurrence": pool.cache.layout.recurrence.title,
                        "state_error": float(error),
                        "folds": int(pool.cache.folds[0]),
                    }
                )
        return sorted(rows, key=lambda row: row["layer"])


def _exact(layout: Layout) -> Layout:
    return replace(layout, dtype=torch.float64, precision=Precision(torch.float64), conv=None)


def _inputs(view: dict[str, Tensor], entries: slice) -> LinearInputs:
    """Entries of slot 0 in float64, lowered. The oracle's outputs are not asked for, so any query does."""
    taken = {name: view[name][0][:, entries].double().transpose(0, 1) for name in _BUFFER if name in view}
    k = taken["key"]
    if "key_scale" in taken:
        k = k * taken["key_scale"][..., None]
    return LinearInputs(k, k, taken["value"], taken.get("decay"), taken["weight"])


_BUFFER = ("key", "key_scale", "value", "weight", "decay")
