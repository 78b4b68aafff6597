"""Which sequences are in slots, and which wait.

A sequence waits, runs in a slot, or is parked: taken out of its slot with everything that is computed, to go on later.
Higher priority first, then the older request; a higher one takes the slot of a lower one.
"""

from __future__ import annotations

import heapq

from .drafters import Drafter
from .prefix import PrefixCache
from .request import Finish, Request, Sample
from .runner import Runner


class Scheduler:
    """Slots and queue of an engine.

    Attributes:
        running: sequences in slots, oldest admission first.
        free: empty slots.
        preemptions: how often a sequence was taken out of its slot before its end.
        reused: prompt tokens that were not computed again.
    """

    def __init__(self, runner: Runner, prefix: PrefixCache, drafter: Drafter | None) -> None:
        """All slots are empty."""
        self.runner, self.prefix, self.drafter = runner, prefix, drafter
        self.running: list[Sample] = []
        self.free = list(range(runner.slots))[::-1]
        self.preemptions = self.reused = 0
        self._waiting: list[tuple[tuple[int, tuple[int, int]], Sample]] = []

    @property
    def waiting(self) -> list[Sample]:
        """Sequences that wait or are parked, next one first."""
        return [sample for _, sample in sorted(self._waiting, key=lambda entry: entry[0]) if sample.finish is None]

    def add(self, sample: Sample) -> None:
        """A sequence wants a slot."""
        heapq.heappush(self._waiting, (_rank(sample), sample))

    def admit(self) -> None:
        """Give slots to those that wait, as far as there are any."""
        while self._waiting:
            sample = self._waiting[0][1]
            if sample.finish is not None:
                heapq.heappop(self._waiting)
                continue
            if not self.free:
                last = max(self.running, key=_rank)
                if last.request.priority >= sample.request.priority:
                    return
                self.preempt(last)
            heapq.heappop(self._waiting)
            self._start(sample)

    def preempt(self, sample: Sample) -> None:
        """Take a sequence out of its slot; it goes on from where it was when a slot is free."""
        assert sample.slot is not None
        sample.parked = [self.runner.export(sample.slot)]
        self._vacate(sample)
        self.preemptions += 1
        self.add(sample)

    def spread(self, request: Request) -> None:
        """The first sample's prompt is computed: the other ones go on from there."""
        first, *others = request.samples
        assert first.slot is not None
        snapshot = None
        for sample in others:
            sample.computed = first.computed
            if self.free:
                sample.slot = self.free.pop()
                self.runner.fork(first.slot, sample.slot)
                self.running.append(sample)
            else:
                snapshot = snapshot or [self.runner.export(first.slot)]
                sample.parked = snapshot
                self.add(sample)

    def finish(self, sample: Sample, reason: Finish) -> None:
        """A sequence is over; its slot is free."""
        sample.finish, sample.parked = reason, None
        if sample.slot is not None:
            self._vacate(sample)

    def _start(self, sample: Sample) -> None:
        sample.slot = slot = self.free.pop()
        self.running.append(sample)
        phase = None
        if sample.parked is None:
            # Folds fall where this request's own would: exact in every precision, whoever computed the beginning.
            phase = len(sample.request.prompt)
            # The last token of the prompt is always computed: its logits are wanted.
            found = self.prefix.find(sample.known[:-1])
            self.reused += found[-1].length if found else 0
            sample.parked = found or None
        if sample.parked is None:
            self.runner.reset(slot)
        else:
            self.runner.import_(slot, sample.parked, phase)
            sample.parked = None
        sample.computed = self.runner.lengths[slot]

    def _vacate(self, sample: Sample) -> None:
        assert sample.slot is not None
        self.runner.lengths[sample.slot] = 0
        self.free.append(sample.slot)
        self.running.remove(sample)
        sample.slot = None
        if self.drafter is not None:
            self.drafter.forget(sample.key)


def _rank(sample: Sample) -> tuple[int, tuple[int, int]]:
    return -sample.request.priority, sample.key
