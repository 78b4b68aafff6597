"""Any sequence of submitting, admitting, sharing, preempting and ending keeps the slots and loses no sequence."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replayssm.engine import Params, Request, Sample
from replayssm.engine.prefix import PrefixCache
from replayssm.engine.runner import Snapshot
from replayssm.engine.scheduler import Scheduler


class Slots:
    """A runner without a model: each slot remembers whose sequence it holds."""

    def __init__(self, slots):
        self.slots, self.lengths, self.held = slots, [0] * slots, [None] * slots

    def reset(self, slot):
        self.lengths[slot], self.held[slot] = 0, None

    def fork(self, source, target):
        self.lengths[target], self.held[target] = self.lengths[source], self.held[source]

    def export(self, slot, start=0):
        return Snapshot(start, self.lengths[slot], [{"whose": self.held[slot]}], {})

    def import_(self, slot, parts, phase=None):
        self.lengths[slot], self.held[slot] = parts[-1].length, parts[-1].states[0]["whose"]


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = Slots(3)
        self.scheduler = Scheduler(self.runner, PrefixCache(4, 0), None)
        self.requests = []

    def running(self, draw):
        return self.scheduler.running[draw % len(self.scheduler.running)]

    @rule(priority=st.integers(0, 2), n=st.integers(1, 4), length=st.integers(1, 9))
    def submit(self, priority, n, length):
        request = Request(len(self.requests), [1] * length, Params(n=n), priority)
        request.samples = [Sample(request, i, 0, known=list(request.prompt)) for i in range(n)]
        self.requests.append(request)
        self.scheduler.add(request.samples[0])

    @rule()
    def admit(self):
        self.scheduler.admit()
        waiting, running = self.scheduler.waiting, self.scheduler.running
        assert not (waiting and self.scheduler.free)
        if waiting:
            assert waiting[0].request.priority <= min(sample.request.priority for sample in running)

    @precondition(lambda self: self.scheduler.running)
    @rule(draw=st.integers(0, 9), whole=st.booleans())
    def compute(self, draw, whole):
        sample = self.running(draw)
        rest = len(sample.known) - sample.computed
        sample.computed += rest if whole else rest // 2
        self.runner.lengths[sample.slot], self.runner.held[sample.slot] = sample.computed, sample.request.id
        if sample.computed == len(sample.known) and not sample.tokens:
            self.scheduler.spread(sample.request)
            for each in sample.request.samples:
                each.tokens.append(7)
                each.known.append(7)
        elif sample.computed == len(sample.known):
            sample.tokens.append(7)
            sample.known.append(7)

    @precondition(lambda self: self.scheduler.running)
    @rule(draw=st.integers(0, 9))
    def preempt(self, draw):
        self.scheduler.preempt(self.running(draw))

    @precondition(lambda self: self.scheduler.running)
    @rule(draw=st.integers(0, 9))
    def end(self, draw):
        self.scheduler.finish(self.running(draw), "length")

    @precondition(lambda self: self.requests)
    @rule(draw=st.integers(0, 99))
    def cancel(self, draw):
        for sample in self.requests[draw % len(self.requests)].samples:
            if sample.finish is None:
                self.scheduler.finish(sample, "cancelled")

    @invariant()
    def every_slot_is_free_or_has_one_sequence(self):
        used = [sample.slot for sample in self.scheduler.running]
        assert sorted([*used, *self.scheduler.free]) == [0, 1, 2]
        assert all(self.runner.lengths[slot] == 0 for slot in self.scheduler.free)

    @invariant()
    def a_slot_holds_what_its_sequence_has_computed(self):
        for sample in self.scheduler.running:
            assert self.runner.lengths[sample.slot] == sample.computed
            assert sample.parked is None
            assert not sample.computed or self.runner.held[sample.slot] == sample.request.id

    @invariant()
    def no_sequence_is_lost(self):
        here = {*self.scheduler.running, *self.scheduler.waiting}
        for request in self.requests:
            started = request.samples if request.samples[0].tokens else request.samples[:1]
            for sample in started:
                assert (sample in here) == (sample.finish is None)
                assert sample.finish is None or (sample.slot is None and sample.parked is None)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)
