"""Read texts once under all policies side by side, and compare what they predict."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from replayssm.checks import ReplayError
from replayssm.drift.attention import implementation
from replayssm.drift.bins import Bins, Sums
from replayssm.drift.layer import Layer, step_tokens
from replayssm.drift.policies import Policy
from replayssm.integrations.transformers import attach, detach
from replayssm.integrations.transformers.cache import adopt
from replayssm.integrations.transformers.registry import find_mixers


class Drift:
    """A measurement; ``run`` it, then read the sums.

    Attributes:
        policies: the reference first.
        texts: R.
        kl: KL divergence of the next token's distribution from the reference's, nats.
        kl_squares: its square, for the error of a mean.
        agreement: 1 where the likeliest token is the reference's.
        nll: minus the log-probability of the token that follows, nats.
        errors: for each recurrent layer (by its place in the model), the squared difference of its outputs and those of
            the float64 recurrence of the same inputs, and the squares of the latter.
        recurrences: the layers' recurrences, by title.
    """

    def __init__(
        self,
        model: Any,
        policies: list[Policy],
        tokens: int,
        texts: int = 1,
        window: int = 16,
        chunk: int = 512,
        attention: int | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare a measurement.

        Args:
            model: of transformers, with recurrent layers that can be replayed.
            policies: of ``policies.parse``.
            tokens: N of a text, a multiple of the window.
            texts: R, read at once.
            window: of the caches.
            chunk: tokens that a forward brings; rounded up to a multiple of the window.
            attention: how many tokens attention looks back on, the token itself included; None: all.
            seed: of stochastic rounding.

        Raises:
            ReplayError: a number that does not fit.
        """
        if tokens < window or tokens % window:
            raise ReplayError(f"tokens: expected a multiple of the window ({window}), got {tokens}")
        self.model, self.policies, self.tokens, self.texts = model, policies, tokens, texts
        self.window, self.seed = window, seed
        self.chunk = min(-(-chunk // window) * window, tokens)
        self.attention = attention
        self.device = next(model.parameters()).device
        self.bins = Bins(tokens)
        self.kl, self.kl_squares, self.agreement, self.nll = (self._sums() for _ in range(4))
        self.errors: dict[int, tuple[Sums, Sums]] = {}
        self.recurrences: dict[int, str] = {}

    @property
    def step_tokens(self) -> int:
        """Tokens that a step of the caches brings."""
        return step_tokens(self.window)

    @torch.no_grad()
    def run(self, ids: Tensor, progress: Callable[[int], None] = lambda done: None) -> Drift:
        """Read ids [R, N + 1]; ``progress`` is told the tokens of a text that are done."""
        places = [int(mixer.layer_idx) for mixer, _ in find_mixers(self.model)]  # type: ignore[arg-type]
        model = attach(self.model, window=self.window)
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation(implementation(self.attention))
            self._read(ids.to(self.device), places, progress)
        finally:
            model.set_attn_implementation(before)
            detach(model)
        return self

    def _read(self, ids: Tensor, places: list[int], progress: Callable[[int], None]) -> None:
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        layers = {place: self._layer(cache, place) for place in places}
        for start in range(0, self.tokens, self.chunk):
            stop = min(start + self.chunk, self.tokens)
            logits = self._forward(ids[:, start:stop], cache, start)
            self._compare(logits.unflatten(0, (len(self.policies), self.texts)), ids[:, start + 1 : stop + 1], start)
            for place, layer in layers.items():
                self._audit(place, layer, start)
            self._forget(cache)
            progress(stop)
        for layer in layers.values():
            layer.check()

    def _layer(self, cache: DynamicCache, place: int) -> Layer:
        """A layer of the cache whose recurrence is ours."""
        found = adopt(cache, place)
        assert found is not None
        layer = Layer(self.policies, self.texts, self.window, self.seed + place)
        found.advance = layer.advance  # type: ignore[method-assign]
        return layer

    def _forward(self, ids: Tensor, cache: DynamicCache, start: int) -> Tensor:
        """Logits [P·R, T, vocabulary]."""
        known = inspect.signature(self.model.forward).parameters
        options: dict[str, Any] = {"use_cache": True}
        options[next(name for name in ("cache", "past_key_values", "cache_params") if name in known)] = cache
        rows = ids.repeat(len(self.policies), 1)
        if "position_ids" in known:
            options["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device).expand(len(rows), -1)
        return self.model(input_ids=rows, **options).logits

    def _compare(self, logits: Tensor, following: Tensor, start: int) -> None:
        """Compare [P, R, T, vocabulary] with the first policy's, in float64: some differ by less than float32 shows."""
        kl, agreement, nll = (torch.empty(logits.shape[:-1], dtype=torch.float64, device=logits.device) for _ in "123")
        truth = logits[0].double().log_softmax(-1)
        weight, likeliest = truth.exp(), logits[0].argmax(-1)
        for i, part in enumerate(logits):
            found = part.double().log_softmax(-1)
            nll[i] = -found.gather(-1, following[..., None])[..., 0]
            kl[i] = (weight * (truth - found)).sum(-1)
            agreement[i] = (part.argmax(-1) == likeliest).double()
        for sums, values in ((self.kl, kl), (self.kl_squares, kl * kl), (self.agreement, agreement), (self.nll, nll)):
            sums.add(values, start)

    def _audit(self, place: int, layer: Layer, start: int) -> None:
        """Compare a layer's outputs of the last chunk with the float64 recurrence."""
        if place not in self.errors:
            self.errors[place], self.recurrences[place] = (self._sums(), self._sums()), layer.recurrence
        for sums, value in zip(self.errors[place], (layer.out.double() - layer.truth, layer.truth), strict=True):
            sums.add(value.square().sum((2, 3)).unflatten(0, (len(self.policies), self.texts)), start)

    def _forget(self, cache: DynamicCache) -> None:
        """Drop keys and values that no later token looks back on."""
        if self.attention is None:
            return
        for layer in cache.layers:
            for name in ("keys", "values"):
                if isinstance(held := getattr(layer, name, None), Tensor) and held.ndim == 4:
                    setattr(layer, name, held[:, :, -self.attention :])

    def _sums(self) -> Sums:
        return Sums(self.bins, len(self.policies), self.device)
