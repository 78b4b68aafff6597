"""One step of an engine: plan, draft, one forward, choose, one commit, tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .drafters import Ask, Drafter, Observer, Seen
from .packed import Row
from .request import Event, Request, Sample
from .runner import Runner, Scores
from .sampling import Point, chosen, logprob
from .scheduler import Scheduler
from .tree import Draft


@dataclass
class Counters:
    """What an engine has done.

    Attributes:
        forwards: of the model.
        tokens: new ones that were handed out.
        prompt: prompt tokens that were computed.
        drafted: tokens that were drafted, and
        accepted: how many of these were right.
    """

    forwards: int = 0
    tokens: int = 0
    prompt: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Work:
    """A sequence's part of a forward.

    Attributes:
        sample: whose.
        row: the tokens it brings.
        places: which of the forward's logits are its own.
        draft: its draft; None: a part of the prompt.
    """

    sample: Sample
    row: Row
    places: range
    draft: Draft | None

    @property
    def choosers(self) -> list[Sample]:
        """Who chooses at the row's logits: the sample; where its prompt ends, all samples of the prompt."""
        if not self.row.wanted:
            return []
        return self.sample.request.samples if self.draft is None and not self.sample.tokens else [self.sample]


class Loop:
    """What turns slots full of sequences into tokens.

    Attributes:
        counters: what was done so far.
        news: events that the next step hands out first.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        drafter: Drafter | None,
        chunk: int,
        vocabulary: int,
        ends: frozenset[int],
    ) -> None:
        """``chunk``: parts of prompts end at its multiples. ``ends``: the model's end-of-text tokens."""
        self.runner, self.scheduler, self.drafter = runner, scheduler, drafter
        self.chunk, self.vocabulary, self.ends = chunk, vocabulary, ends
        self.counters = Counters()
        self.news: list[Event] = []
        self._observer = drafter if isinstance(drafter, Observer) else None
        if self._observer is not None:
            runner.watch()

    def step(self) -> list[Event]:
        """See ``Engine.step``."""
        events, self.news = self.news, []
        running: list[Sample] = []
        try:
            self.scheduler.admit()
            running = list(self.scheduler.running)
            if running:
                events += self._run(self._plan(running))
        except BaseException as error:
            for sample in [*running, *self.scheduler.running]:
                self.fail(sample.request, f"{type(error).__name__}: {error}")
            self.news = events + self.news
            raise
        return events

    def cancel(self, request: Request) -> None:
        """See ``Engine.cancel``."""
        for sample in request.samples:
            if sample.finish is None:
                self.scheduler.finish(sample, "cancelled")
                self.news.append(self._event(sample, []))

    def fail(self, request: Request, problem: str) -> None:
        """End a request that cannot go on."""
        for sample in request.samples:
            if sample.finish is None:
                request.error = problem
                self.scheduler.finish(sample, "error")
                self.news.append(self._event(sample, []))

    def _plan(self, running: list[Sample]) -> list[Work]:
        """What each sequence brings: a decode step with its draft, or the next part of its prompt."""
        work, at, budget = [], 0, self.chunk
        drafts = self._drafts([sample for sample in running if sample.decoding])
        for sample in running:
            assert sample.slot is not None
            draft = drafts.get(sample)
            if draft is not None:
                row = Row(sample.slot, [sample.known[-1], *draft.tokens], draft.row_parents, 1 + draft.size)
            else:
                stop = min(len(sample.known), (sample.computed // self.chunk + 1) * self.chunk)
                # Whole parts only: where a part ends must not depend on the batch.
                if stop - sample.computed > budget:
                    continue
                budget -= stop - sample.computed
                tokens, wanted = sample.known[sample.computed : stop], int(stop == len(sample.known))
                row = Row(sample.slot, tokens, wanted=wanted, phase=len(sample.request.prompt))
            work.append(Work(sample, row, range(at, at + row.wanted), draft))
            at += row.wanted
        return work

    def _drafts(self, samples: list[Sample]) -> dict[Sample, Draft]:
        """A draft for each sequence that decodes; an empty one where it would not pay."""
        drafts = {sample: Draft() for sample in samples}
        if self.drafter is None:
            return drafts
        asks: dict[Sample, Ask] = {}
        for sample in samples:
            most = min(self.runner.max_draft - 1, self._left(sample) - 1)
            if depth := sample.acceptance.depth(most, self.drafter.cost):
                asks[sample] = Ask(sample.key, sample.known, depth, most, self._point(sample, []))
        if asks:
            drafts.update(zip(asks, self.drafter.propose(list(asks.values())), strict=True))
        for sample, ask in asks.items():
            drafts[sample].check(ask.limit, self.vocabulary)
        return drafts

    def _run(self, work: list[Work]) -> list[Event]:
        scores = self.runner.score([each.row for each in work])
        self.counters.forwards += 1
        index = [place for each in work for place in each.places for _ in each.choosers]
        points = [point for each in work for point in self._points(each)]
        best, choices = _choices(scores, index, points)
        chosen = iter(choices)
        paths, told = [], []
        for each in work:
            if each.draft is None:
                paths.append(list(range(each.row.count)))
                told += [(sample, [next(chosen)], list(each.places)) for sample in each.choosers]
            else:
                path, text = each.draft.follow([next(chosen) for _ in each.places])
                paths.append(path)
                told.append((each.sample, text, [each.places[node] for node in path]))
                self._measure(each.sample, each.draft, len(path) - 1)
        hidden = self.runner.hidden(paths) if self._observer is not None else []
        trees = any(each.row.parents is not None for each in work)
        self.runner.commit([len(path) for path in paths], paths if trees else None)
        for each, path in zip(work, paths, strict=True):
            self._settle(each, len(path))
        if self._observer is not None:
            self._observer.observe([self._seen(each, kept) for each, kept in zip(work, hidden, strict=True)])
        events: list[Event] = []
        for sample, tokens, places in told:
            if any(best[place] < 0 for place in places):
                self.fail(sample.request, "the model returned logits that are not finite")
            elif sample.finish is None:
                events.append(self._tell(sample, tokens, places, scores))
        events, self.news = events + self.news, []
        return events

    def _points(self, each: Work) -> list[Point]:
        if each.draft is None:
            return [self._point(sample, []) for sample in each.choosers]
        return [self._point(each.sample, each.draft.path(node)) for node in range(-1, each.draft.size)]

    def _point(self, sample: Sample, drafted: list[int]) -> Point:
        params = sample.request.params
        output = [*sample.tokens, *drafted] if params.penalised else ()
        prompt = sample.request.prompt if params.penalised else ()
        return Point(params, sample.seed, len(sample.known) + len(drafted), prompt, output)

    def _measure(self, sample: Sample, draft: Draft, accepted: int) -> None:
        sample.acceptance.note(accepted, draft.depth)
        sample.drafted += draft.size
        sample.accepted += accepted
        self.counters.drafted += draft.size
        self.counters.accepted += accepted

    def _settle(self, each: Work, accepted: int) -> None:
        """Count what is computed, keep beginnings of prompts, and let the samples of a prompt go on from its end."""
        sample = each.sample
        sample.computed += accepted
        if each.draft is not None or sample.tokens:
            return
        self.counters.prompt += accepted
        if sample.computed % self.chunk == 0:
            assert sample.slot is not None
            self.scheduler.prefix.add(sample.known[: sample.computed], self.runner, sample.slot)
        if each.row.wanted:
            self.scheduler.spread(sample.request)

    def _seen(self, each: Work, hidden: Tensor) -> Seen:
        sample = each.sample
        others = sample.request.samples[1:] if each.choosers and each.draft is None else []
        heirs = [other.key for other in others if other.slot is not None and other is not sample]
        return Seen(sample.key, sample.computed - len(hidden), hidden, sample.known, heirs)

    def _tell(self, sample: Sample, tokens: list[int], places: list[int], scores: Scores) -> Event:
        """Hand out what was chosen, up to where the text ends."""
        params, told = sample.request.params, []
        sample.steps += 1
        for token, place in zip(tokens, places, strict=True):
            for line in (sample.tokens, sample.known, told):
                line.append(token)
            if params.logprobs is not None:
                sample.logprobs.append(logprob(scores.of([place])[0], token, params.logprobs))
            if self._ended(sample, token):
                break
        self.counters.tokens += len(told)
        return self._event(sample, told)

    def _ended(self, sample: Sample, token: int) -> bool:
        """Whether the text ends with this token; then the sample is finished."""
        params = sample.request.params
        if token in params.stop_tokens or (token in self.ends and not params.ignore_eos):
            self.scheduler.finish(sample, "stop")
            return True
        last = self._left(sample) == 0
        if sample.stream is not None:
            sample.stream.push(token)
            if last:
                sample.stream.end()
            if sample.stream.stopped:
                self.scheduler.finish(sample, "stop")
                return True
        if last:
            self.scheduler.finish(sample, "length")
        return last

    def _event(self, sample: Sample, tokens: list[int]) -> Event:
        final = sample.finish is not None
        if final and sample.stream is not None:
            sample.stream.end()
        text = "" if sample.stream is None else sample.stream.news(final)
        return Event(sample, tokens, text, sample.finish)

    def _left(self, sample: Sample) -> int:
        """Tokens that the sample may still get."""
        room = self.runner.max_length - len(sample.known)
        most = sample.request.params.max_tokens
        return room if most is None else min(room, most - len(sample.tokens))


def _choices(scores: Scores, index: list[int], points: list[Point]) -> tuple[list[int], list[int]]:
    """The likeliest token everywhere (−1: no numbers), and the token at each point, read back in one go."""
    drawn = [i for i, point in enumerate(points) if not point.plain]
    parts = [scores.best]
    if drawn:
        parts.append(chosen(scores.of([index[i] for i in drawn]), [points[i] for i in drawn]))
    read = torch.cat(parts).tolist()
    best, rest = read[: len(scores.best)], read[len(scores.best) :]
    choices = [best[i] for i in index]
    for i, token in zip(drawn, rest, strict=True):
        choices[i] = token
    return best, choices
