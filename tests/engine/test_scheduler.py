"""Slots: several samples of a prompt, priorities, preemption, cancelling, failures. Nothing is lost or left."""

import pytest
import torch
from engine_tiny import Oracle, engine, lengthy, prompts, texts, tiny

from replayssm import ReplayError
from replayssm.engine import DraftModel, Params, PromptLookup
from replayssm.engine.device import best_of
from replayssm.engine.runner import Scores


def assert_empty(served):
    assert served.idle
    assert sorted(served.scheduler.free) == list(range(served.runner.slots))
    assert set(served.runner.lengths) == {0}


def exhaust(served):
    while not served.idle:
        served.step()


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "kimi_linear"])
def test_samples_of_a_prompt_share_its_computation(name, slots):
    model, wanted = tiny(name)
    with engine(model, slots=slots) as served:
        greedy = served.generate(prompts()[3], Params(max_tokens=11, n=4))[0]
        assert [sample.tokens for sample in greedy.samples] == [wanted[3]] * 4
        assert served.counters.prompt == 21
        many = served.generate(prompts()[3], Params(max_tokens=6, n=4, temperature=1.0, seed=2))[0]
        assert_empty(served)
    with engine(model, slots=slots) as served:
        for index, sample in enumerate(many.samples):
            alone = Params(max_tokens=6, n=index + 1, temperature=1.0, seed=2)
            assert served.generate(prompts()[3], alone)[0].samples[index].tokens == sample.tokens


@pytest.mark.parametrize("make", [lambda: None, PromptLookup, lambda: DraftModel(tiny("mamba2")[0])])
def test_preempted_requests_go_on_with_the_same_text(make):
    model, wanted = tiny()
    with engine(model, slots=2, drafter=make(), max_draft=4) as served:
        requests = [served.submit(ids, params) for ids, params in zip(prompts(), lengthy(), strict=True)]
        for step in range(60):
            served.step()
            if step % 2:
                served.preempt(requests[step % 4])
        assert served.scheduler.preemptions >= 4
        assert texts(requests) == wanted
        assert_empty(served)


def test_a_higher_priority_takes_a_slot():
    model, wanted = tiny()
    with engine(model, slots=1) as served:
        low = served.submit(prompts()[3], Params(max_tokens=11))
        for _ in range(5):
            served.step()
        high = served.submit(prompts()[1], Params(max_tokens=9), priority=1)
        equal = served.submit(prompts()[2], Params(max_tokens=10), priority=1)
        while not high.finished:
            served.step()
            assert not equal.tokens
        assert not low.finished
        while not served.idle:
            served.step()
            assert equal.finished or len(low.tokens) < 11
        assert [low.tokens, high.tokens, equal.tokens] == [wanted[3], wanted[1], wanted[2]]
        assert served.scheduler.preemptions == 1
        assert_empty(served)


def test_cancelled_requests_free_their_slots():
    model, wanted = tiny()
    drafter = Oracle({tuple(ids): line for ids, line in zip(prompts(), wanted, strict=True)})
    with engine(model, slots=2, drafter=drafter, max_draft=4) as served:
        requests = [served.submit(ids, params) for ids, params in zip(prompts(), lengthy(), strict=True)]
        several = served.submit(prompts()[2], Params(max_tokens=40, n=5))
        served.step()
        served.cancel(requests[0])  # runs
        served.cancel(requests[2])  # waits
        events = served.step()
        assert [(e.request.id, e.finish) for e in events[:2]] == [(0, "cancelled"), (2, "cancelled")]
        while not several.samples[0].tokens:
            served.step()
        served.cancel(several)  # runs and is parked
        served.cancel(several)
        while not served.idle:
            served.step()
        assert [requests[i].tokens for i in (1, 3)] == [wanted[i] for i in (1, 3)]
        assert {sample.finish for sample in several.samples} == {"cancelled"}
        assert_empty(served)
        assert not drafter.keys
    assert drafter.closed


def test_a_failing_model_ends_what_ran_and_nothing_else(monkeypatch):
    model, wanted = tiny()
    with engine(model, slots=2) as served:
        requests = [served.submit(ids, params) for ids, params in zip(prompts(), lengthy(), strict=True)]
        for _ in range(3):
            served.step()
        with monkeypatch.context() as patch:
            patch.setattr(model.lm_head, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                served.step()
        failed = [request for request in requests if request.finished]
        assert failed
        assert all("ZeroDivisionError" in r.error and r.samples[0].finish == "error" for r in failed if r.error)
        while not served.idle:
            served.step()
        assert [r.tokens for r in requests[2:]] == wanted[2:]
        assert_empty(served)


def test_a_sequence_that_cannot_come_back_fails_and_nothing_else(monkeypatch):
    model, wanted = tiny()
    with engine(model, slots=1) as served:
        low = served.submit(prompts()[3], Params(max_tokens=11))
        for _ in range(5):
            served.step()
        high = served.submit(prompts()[1], Params(max_tokens=9), priority=1)
        while not high.finished:
            served.step()
        last = served.submit(prompts()[2], Params(max_tokens=10))
        with monkeypatch.context() as patch:
            patch.setattr(served.runner, "import_", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                served.step()
        assert (low.samples[0].finish, low.error) == ("error", "ZeroDivisionError: division by zero")
        assert [event.request for event in served.step()] == [low]
        exhaust(served)
        assert [high.tokens, last.tokens] == [wanted[1], wanted[2]]
        assert_empty(served)


def test_a_failing_drafter_ends_what_ran_and_nothing_else(monkeypatch):
    model, wanted = tiny()
    known = {tuple(ids): line for ids, line in zip(prompts(), wanted, strict=True)}
    with engine(model, slots=2, drafter=Oracle(known), max_draft=4) as served:
        requests = [served.submit(ids, params) for ids, params in zip(prompts(), lengthy(), strict=True)]
        with monkeypatch.context() as patch:
            patch.setattr(served.drafter, "propose", lambda asks: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                exhaust(served)
        failed = [request for request in requests if request.finished]
        assert [request.samples[0].finish for request in failed] == ["error"] * 2
        exhaust(served)
        assert [r.tokens for r in requests[2:]] == wanted[2:]
        assert_empty(served)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_one_request(monkeypatch, temperature):
    model, wanted = tiny()
    params = lengthy()
    params[1] = Params(max_tokens=9, temperature=temperature)
    with engine(model, slots=4) as served:
        requests = [served.submit(ids, each) for ids, each in zip(prompts(), params, strict=True)]
        score, ran = served.runner.score, []

        def broken(rows):
            scores = score(rows)
            ran.append(len(rows))
            if len(ran) == 6:
                place = sum(row.wanted for row in rows[: [row.slot for row in rows].index(requests[1].samples[0].slot)])
                logits = scores.logits.clone()
                logits[place, 5] = torch.nan
                return Scores(logits, None, best_of(logits))
            return scores

        monkeypatch.setattr(served.runner, "score", broken)
        while not served.idle:
            served.step()
        assert requests[1].samples[0].finish == "error"
        assert "not finite" in requests[1].error
        assert [requests[i].tokens for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]
        assert_empty(served)


def test_closing_cancels():
    model, _ = tiny()
    served = engine(model, slots=1)
    requests = [served.submit(ids, Params(max_tokens=20)) for ids in prompts()]
    served.step()
    served.close()
    assert {request.samples[0].finish for request in requests} == {"cancelled"}
    served.close()
    with pytest.raises(ReplayError, match="is closed"):
        served.generate(prompts())
    with engine(model) as again, pytest.raises(ReplayError, match="expected one or 4"):
        again.generate(prompts(), [Params()])
