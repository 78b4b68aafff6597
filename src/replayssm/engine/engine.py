"""Continuous batching with speculation: requests in, tokens out, one packed forward at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from replayssm import Precision, ReplayError, checks

from .drafters import Drafter
from .loop import Counters, Loop
from .prefix import PrefixCache
from .request import Event, Params, Request, Sample
from .runner import Runner, settings_of, window_of
from .sampling import mix
from .scheduler import Scheduler
from .text import TextStream

Prompt = str | Sequence[int]


class Engine:
    """A model that continues many texts at once.

    The model is bound while the engine lives: its own ``generate`` works as before, ``close`` frees it. An engine is
    a context manager.

    Attributes:
        runner: the model with its memory: ``runner.slots``, ``runner.bytes``.
        scheduler: who is in a slot and who waits.
        prefix: beginnings of prompts that are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        slots: int | None = None,
        memory: int | None = None,
        max_length: int = 2048,
        window: int | None = None,
        max_draft: int | None = None,
        precision: Precision | None = None,
        drafter: Drafter | None = None,
        chunk: int = 128,
        prefix_memory: int = 0,
        graphs: bool = True,
        seed: int = 0,
    ) -> None:
        """Bind a model and allocate its memory, once.

        Args:
            model: of transformers, recurrent, hybrid or with attention only.
            tokenizer: for prompts, text and stop strings; not needed for token ids.
            slots: sequences that run at a time; 8 where neither this nor ``memory`` is given.
            memory: bytes for sequences, instead of ``slots``; what a drafter keeps of them comes on top.
            max_length: most tokens of a sequence, prompt included.
            window: entries of a buffer, drafts included; a state is written once in about so many tokens less the
                drafts. None: what decodes fastest (``plan.choose_window``).
            max_draft: most tokens of a sequence in one decode step, drafts and the one before them; by default 1
                without a drafter and 8 with one.
            precision: how states are stored; float32 by default.
            drafter: who guesses the next tokens; None: nobody.
            chunk: prompts are computed in parts that end at multiples of this.
            prefix_memory: bytes for beginnings of prompts, kept at multiples of ``chunk``; 0: none are kept.
            graphs: on a GPU, capture decode and verify in CUDA graphs, one for each batch size up to the next power of
                two; on the CPU there are none. Layers that wait for the device or change their shapes (experts that are
                called one by one, latent attention) cannot be captured.
            seed: of requests without a seed of their own.

        Raises:
            ReplayError: a number out of range, too little memory for the sequences, or a model that is on another
                device than a CPU or CUDA, is attached already or has layers that cannot be served.
        """
        device = next(model.parameters()).device
        if device.type not in ("cpu", "cuda"):
            raise ReplayError(f"model: the engine runs on the CPU and on CUDA, and the model is on {device}")
        if slots is not None and memory is not None:
            raise ReplayError("slots: give slots or memory, not both")
        slots = 8 if slots is None and memory is None else slots
        for name, value, least in (("slots", slots, 1), ("memory", memory, 1), ("max_length", max_length, 2)):
            if value is not None:
                checks.integer(name, value, least)
        checks.integer("prefix_memory", prefix_memory, 0)
        most = max_draft if max_draft is not None else (8 if drafter is not None else 1)
        settings = settings_of(window_of(model, most) if window is None else window, most, precision)
        checks.integer("chunk", chunk, 1)
        self.tokenizer, self.drafter, self.seed = tokenizer, drafter, checks.integer("seed", seed, 0)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self.runner = Runner(model, slots, memory, max_length, settings, graphs)
        try:
            if drafter is not None:
                drafter.bind(model, self.runner.slots, max_length, most)
        except BaseException:
            self.runner.close()
            raise
        self.prefix = PrefixCache(chunk, prefix_memory)
        self.scheduler = Scheduler(self.runner, self.prefix, drafter)
        self._loop = Loop(self.runner, self.scheduler, drafter, chunk, self._vocabulary, _end_tokens(model))
        self._requests = 0
        self._closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and make the model stock again. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        for sample in [*self.scheduler.running, *self.scheduler.waiting]:
            self.cancel(sample.request)
        self.prefix.clear()
        self.runner.close()
        if self.drafter is not None:
            self.drafter.close()

    def submit(self, prompt: Prompt, params: Params | None = None, priority: int = 0) -> Request:
        """Queue a prompt; ``step`` brings it on.

        Raises:
            ReplayError: the engine is closed, the prompt is empty or has tokens that the model has not, or prompt and
                ``max_tokens`` do not fit into ``max_length``, or stop strings are asked for without a tokenizer.
        """
        if self._closed:
            raise ReplayError("engine: is closed")
        params = Params() if params is None else params
        tokens = self._tokens(prompt)
        limit = self.runner.max_length
        new = params.max_tokens if params.max_tokens is not None else 1
        if len(tokens) + new > limit:
            raise ReplayError(
                f"prompt: {len(tokens)} tokens and max_tokens={new} do not fit into max_length={limit} of this engine"
            )
        if params.logprobs is not None and params.logprobs > self._vocabulary:
            raise ReplayError(f"logprobs: expected at most {self._vocabulary}, got {params.logprobs}")
        if params.stop and self.tokenizer is None:
            raise ReplayError("stop: stop strings need the engine's tokenizer")
        request = Request(self._requests, tokens, params, priority)
        self._requests += 1
        seed = mix(self.seed, request.id) if params.seed is None else params.seed
        for index in range(params.n):
            stream = None if self.tokenizer is None else TextStream(self.tokenizer, params.stop)
            request.samples.append(Sample(request, index, mix(seed, index), known=list(tokens), stream=stream))
        self.scheduler.add(request.samples[0])
        return request

    def cancel(self, request: Request) -> None:
        """End a request now; its slots are free. One that has finished stays as it is."""
        self._loop.cancel(request)

    def preempt(self, request: Request) -> None:
        """Take a request out of its slots for others that wait; it goes on when a slot is free, with the same text."""
        for sample in request.samples:
            if sample.slot is not None:
                self.scheduler.preempt(sample)

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        return self._loop.counters

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is left to tell."""
        return not (self.scheduler.running or self.scheduler.waiting or self._loop.news)

    def step(self) -> list[Event]:
        """Admit, draft, run the model once, and hand out the new tokens.

        Raises:
            Exception: what the model or the drafter raised. The requests that ran have finished with "error"; those
                that wait are unharmed.
        """
        return self._loop.step()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None
    ) -> list[Request]:
        """Continue prompts to their ends.

        Args:
            prompts: texts or token ids; one or several.
            params: for all, or for each.

        Returns:
            The finished requests in the order of the prompts: ``.text`` and ``.tokens`` of the first sample, and
            ``.samples``.

        Raises:
            ReplayError: as ``submit``; then nothing runs.
        """
        requests = self._submit_all(prompts, params)
        for _ in self._drive(requests):
            pass
        return requests

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None
    ) -> Iterator[Event]:
        """As ``generate``, but tell of new tokens as they come. Leaving the loop cancels the requests."""
        return self._drive(self._submit_all(prompts, params))

    def _drive(self, requests: list[Request]) -> Iterator[Event]:
        ours = set(map(id, requests))
        try:
            while not all(request.finished for request in requests) or self._loop.news:
                yield from (event for event in self.step() if id(event.request) in ours)
        finally:
            for request in requests:
                if not request.finished:
                    self.cancel(request)

    def _submit_all(self, prompts: Any, params: Any) -> list[Request]:
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # tensors and arrays
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Prompt] = [prompts] if single else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        if len(each) != len(listed):
            raise ReplayError(f"params: expected one or {len(listed)}, got {len(each)}")
        requests: list[Request] = []
        try:
            for prompt, param in zip(listed, each, strict=True):
                requests.append(self.submit(prompt, param))
        except ReplayError:
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ReplayError("prompt: text needs the engine's tokenizer; give it one, or pass token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise ReplayError("prompt: expected at least one token, got none")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise ReplayError(f"prompt: expected token ids 0…{self._vocabulary - 1}, got {min(tokens)}…{max(tokens)}")
        return tokens


def _end_tokens(model: nn.Module) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else (int(end) for end in torch.as_tensor(ends).tolist()))
