"""Load test of the engine: requests that come, go, are cancelled and preempted at random, whoever drafts.

    python benchmarks/load.py                      # 2,000 requests on the model in the box
    python benchmarks/load.py --requests 200 --seed 3

Every text must be the one that the request gets alone (greedy ones from ``model.generate``, sampled ones from an engine
of one slot without drafts), and in the end no slot, no sequence and no byte may be left.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine import shallow
from replayssm import models
from replayssm.engine import (
    Ask,
    Draft,
    Drafter,
    DraftModel,
    Engine,
    MtpDrafter,
    MtpHead,
    Observer,
    Params,
    PromptLookup,
    Request,
    Seen,
    SuffixLookup,
)


class Mixture:
    """A drafter that gives each request to one of several."""

    cost = 0.2

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = drafters

    def bind(self, model: Any, slots: int, max_length: int, max_draft: int) -> None:
        """See ``Drafter.bind``."""
        for drafter in self.drafters:
            drafter.bind(model, slots, max_length, max_draft)

    def close(self) -> None:
        """See ``Drafter.close``."""
        for drafter in self.drafters:
            drafter.close()

    def forget(self, key: Hashable) -> None:
        """See ``Drafter.forget``."""
        self._of(key).forget(key)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See ``Drafter.propose``."""
        found: dict[Hashable, Draft] = {}
        for drafter in self.drafters:
            mine = [ask for ask in asks if self._of(ask.key) is drafter]
            if mine:
                found.update(zip((ask.key for ask in mine), drafter.propose(mine), strict=True))
        return [found[ask.key] for ask in asks]

    def observe(self, seen: Sequence[Seen]) -> None:
        """See ``Observer.observe``."""
        for drafter in self.drafters:
            mine = [each for each in seen if self._of(each.key) is drafter]
            if mine and isinstance(drafter, Observer):
                drafter.observe(mine)

    def _of(self, key: Hashable) -> Drafter:
        # By request: its samples go on from what their drafter knows of the first one.
        return self.drafters[key[0] % len(self.drafters)]  # type: ignore[index]


@dataclass(frozen=True)
class Case:
    """A request of the load test: when it comes, and what happens to it."""

    arrival: int
    prompt: tuple[int, ...]
    params: Params
    priority: int
    cancel_at: int | None  # cancelled once it has so many tokens


@dataclass
class Report:
    """What a load test found."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    cancelled: int = 0
    preemptions: int = 0
    reused: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def cases(texts: Sequence[Sequence[int]], number: int, seed: int, longest: int, most: int) -> list[Case]:
    """Random requests: beginnings of ``texts`` (many share one), up to ``longest`` tokens and ``most`` new ones."""
    chance, found, now = random.Random(seed), [], 0
    for _ in range(number):
        # Waves: nothing for a while, then many at once.
        now += chance.choice((0, 0, 0, 1, 1, 2)) if chance.random() < 0.97 else 20
        text = chance.choice(texts)
        prompt = tuple(text[: chance.randint(1, min(longest, len(text)))])
        sampled = chance.random() < 0.4
        params = Params(
            max_tokens=chance.randint(1, most),
            temperature=chance.choice((0.6, 1.0)) if sampled else 0.0,
            top_p=chance.choice((0.9, 1.0)) if sampled else 1.0,
            frequency_penalty=chance.choice((0.0, 0.0, 0.3)) if sampled else 0.0,
            seed=chance.randint(0, 9),
            n=chance.choice((1, 1, 1, 1, 2, 3)) if sampled else 1,
            ignore_eos=True,
        )
        cancel = chance.randint(0, most) if chance.random() < 0.1 else None
        found.append(Case(now, prompt, params, chance.choice((0, 0, 0, 0, 0, 1)), cancel))
    return found


def run(model: Any, drafter: Drafter, work: Sequence[Case], seed: int, **options: Any) -> Report:
    """Serve the cases and compare each with its solo run."""
    chance, report, clock = random.Random(seed), Report(len(work)), 0
    before = _tensor_bytes()
    begin = time.perf_counter()
    with Engine(model, drafter=drafter, **options) as engine:
        waiting, served = list(work), []
        first = [work[0].prompt] * (len(drafter.drafters) if isinstance(drafter, Mixture) else 1)
        engine.generate(first, Params(max_tokens=8, ignore_eos=True))  # what is made once is no leak
        full = _tensor_bytes()
        while waiting or not engine.idle:
            while waiting and waiting[0].arrival <= clock:
                case = waiting.pop(0)
                served.append((case, engine.submit(case.prompt, case.params, case.priority)))
            engine.step()
            clock += 1
            for case, request in served:
                if not request.finished and case.cancel_at is not None and len(request.tokens) >= case.cancel_at:
                    engine.cancel(request)
            if chance.random() < 0.05 and engine.scheduler.running:
                engine.preempt(chance.choice(engine.scheduler.running).request)
        report.seconds = time.perf_counter() - begin
        _leaks(engine, drafter, full, report)
        report.preemptions, report.reused = engine.scheduler.preemptions, engine.scheduler.reused
        report.drafted, report.accepted = engine.counters.drafted, engine.counters.accepted
        report.tokens = engine.counters.tokens
    _compare(model, served, report, options["max_length"])
    del engine
    if _tensor_bytes() > before:
        report.left.append(f"{_tensor_bytes() - before} bytes of tensors after the engine")
    return report


def _leaks(engine: Engine, drafter: Drafter, full: int, report: Report) -> None:
    """What is left when everything has finished."""
    held = engine.prefix.bytes
    engine.prefix.clear()
    scheduler = engine.scheduler
    checks = {
        "slots": engine.runner.slots - len(set(scheduler.free)),
        "tokens in slots": sum(engine.runner.lengths),
        "sequences": len(scheduler.running) + len(scheduler.waiting),
        "bytes of tensors": max(0, _tensor_bytes() - full),
        "bytes over prefix_memory": max(0, held - engine.prefix.limit),
    }
    for each in drafter.drafters if isinstance(drafter, Mixture) else [drafter]:
        sizes = [len(value) for name, value in vars(each).items() if isinstance(value, dict) and name != "wanted"]
        checks[f"sequences of {type(each).__name__}"] = sum(sizes)
        free = getattr(each, "_free", range(engine.runner.slots))
        checks[f"slots of {type(each).__name__}"] = engine.runner.slots - len(set(free))
    report.left += [f"{number} {name}" for name, number in checks.items() if number]


def _compare(model: Any, served: Sequence[tuple[Case, Request]], report: Report, max_length: int) -> None:
    """Each text must be the one that the request gets alone; of a cancelled one, its beginning."""
    known: dict[Any, list[list[int]]] = {}
    with Engine(model, slots=1, max_length=max_length) as alone:
        for case, request in served:
            report.samples += len(request.samples)
            report.cancelled += request.samples[0].finish == "cancelled"
            key = (case.prompt, case.params)
            if key not in known:
                known[key] = _solo(model, alone, case)
            for sample, wanted in zip(request.samples, known[key], strict=True):
                if sample.finish == "cancelled":
                    wanted = wanted[: len(sample.tokens)]
                if sample.tokens != wanted and not _tie(model, case, sample.tokens, wanted):
                    report.wrong.append(f"request {request.id}, sample {sample.index}: {sample.tokens} not {wanted}")


def _solo(model: Any, alone: Engine, case: Case) -> list[list[int]]:
    if case.params.temperature:
        return [sample.tokens for sample in alone.generate([case.prompt], case.params)[0].samples]
    ids = torch.tensor([case.prompt])
    eos, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.params.max_tokens, do_sample=False, pad_token_id=0
    )
    model.generation_config.eos_token_id = eos
    return [out[0, ids.shape[1] :].tolist()]


@torch.no_grad()
def _tie(model: Any, case: Case, got: list[int], wanted: list[int]) -> bool:
    """Whether the first difference is between two tokens whose greedy scores are equal to rounding."""
    at = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), None)
    if at is None or case.params.temperature:
        return False
    logits = model(input_ids=torch.tensor([[*case.prompt, *wanted[:at]]]), use_cache=False).logits[0, -1]
    return bool((logits[got[at]] - logits[wanted[at]]).abs() < 1e-4)


def _tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs_gdn", help="a shipped name or a folder")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model, tokenizer = models.load(asked.model, dtype=torch.float32)
    texts = [tokenizer(text)["input_ids"][:400] for text in models.heldout()[:60]]
    drafters = Mixture(
        [
            PromptLookup(),
            SuffixLookup(),
            PromptLookup(branches=3),
            MtpDrafter(MtpHead.load(model), branches=(2, 1), cost=0.1),
            DraftModel(shallow(model, 4), cost=0.1),
        ]
    )
    work = cases(texts, asked.requests, asked.seed, longest=160, most=32)
    report = run(
        model, drafters, work, asked.seed, slots=asked.slots, max_length=256, chunk=32, prefix_memory=200_000_000
    )
    for name, value in vars(report).items():
        print(f"{name:12} {value if not isinstance(value, float) else round(value, 1)}")
    raise SystemExit(bool(report.wrong or report.left))


if __name__ == "__main__":
    main()
