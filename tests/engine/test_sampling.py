"""Filters and penalties as transformers has them; draws with exactly the target's distribution, drafted or not."""

import random

import pytest
import torch
from engine_tiny import Oracle, engine, lengthy, prompts, texts, tiny
from transformers.generation import logits_process as stock

from replayssm import ReplayError
from replayssm.engine import Draft, DraftModel, Params, Point, PromptLookup
from replayssm.engine.sampling import Filters, branches, choose, filtered, gumbel, mix, penalise


def test_filters_are_those_of_transformers():
    torch.manual_seed(0)
    scores = torch.randn(6, 50) * 3
    table = [
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.6, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.9, 9, 0.8, 0.05),
        (2.0, 1, 1.0, 0.0),
    ]
    logs, ids = filtered(scores, Filters(*(torch.tensor(column) for column in zip(*table, strict=True))))
    got = torch.zeros(6, 50).scatter(1, ids, logs.exp())
    for row, (temperature, top_k, top_p, min_p) in enumerate(table):
        warpers = [stock.TemperatureLogitsWarper(temperature)]
        warpers += [stock.TopKLogitsWarper(top_k)] if top_k else []
        warpers += [stock.TopPLogitsWarper(top_p)] if top_p < 1 else []
        warpers += [stock.MinPLogitsWarper(min_p)] if min_p else []
        line = scores[row : row + 1]
        for warper in warpers:
            line = warper(torch.tensor([[0]]), line)
        mine = got[row] / got[row].sum()
        torch.testing.assert_close(mine, line.softmax(-1)[0], rtol=1e-5, atol=1e-6)


def test_penalties():
    torch.manual_seed(0)
    scores, prompt, output = torch.randn(1, 20), [3, 4, 4], [5, 5, 6]
    one = Params(repetition_penalty=1.3)
    wanted = stock.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), scores)
    torch.testing.assert_close(penalise(scores, [Point(one, 0, 6, prompt, output)]), wanted)
    both = Params(presence_penalty=0.5, frequency_penalty=0.25)
    wanted = scores.clone()
    wanted[0, 5] -= 0.5 + 2 * 0.25
    wanted[0, 6] -= 0.5 + 0.25
    torch.testing.assert_close(penalise(scores, [Point(both, 0, 6, prompt, output)]), wanted)


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-38, 1e-46])
def test_very_low_temperatures_are_greedy(temperature):
    torch.manual_seed(3)
    logits = torch.randn(8, 30) * 20
    logits[:, 4] = -torch.inf
    for options in ({}, {"top_k": 3, "min_p": 0.1}):
        points = [Point(Params(temperature=temperature, **options), i, i) for i in range(8)]
        assert choose(logits, points) == logits.argmax(-1).tolist()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How far counts are from expectation, in standard deviations of the statistic."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected).square() / expected).sum()
    freedom = len(counts) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_draws_have_the_distribution(options):
    torch.manual_seed(1)
    params, number = Params(temperature=0.8, **options), 20_000
    logits = torch.randn(12)
    tokens = choose(logits.expand(number, -1), [Point(params, i % 100, i // 100) for i in range(number)])
    filters = Filters(*(torch.tensor([getattr(params, name)]) for name in Filters._fields))
    logs, ids = filtered(logits[None], filters)
    wanted = torch.zeros(12).scatter(0, ids[0], logs[0].exp())
    counts = torch.bincount(torch.tensor(tokens), minlength=12)
    assert not counts[wanted == 0].any()
    assert abs(chi_square(counts[wanted > 0], (wanted / wanted.sum())[wanted > 0])) < 4


def test_noise_is_gumbel_and_independent_of_everything_else():
    ids = torch.arange(500).repeat(40, 1)
    noise = gumbel([mix(seed, position) for seed in range(4) for position in range(10)], ids)
    assert abs(noise.mean() - 0.5772) < 0.03
    assert abs(noise.std() - 1.2825) < 0.03
    assert abs(torch.corrcoef(noise)[~torch.eye(40, dtype=torch.bool)]).max() < 0.2
    backwards = gumbel([mix(2, 3)], ids[:1].flip(1)).flip(1)
    assert torch.equal(backwards[0], noise[23])


def test_keys_differ():
    keys = {mix(seed, index) for seed in range(100) for index in range(100)} | {mix(index) for index in range(100)}
    assert len(keys) == 10_100
    assert all(bin(mix(1, i) ^ mix(1, i + 1)).count("1") > 8 for i in range(200))  # neighbours share no pattern


def test_branches_begin_with_the_choice():
    torch.manual_seed(2)
    logits = torch.randn(3, 20)
    points = [
        Point(Params(), 0, 1),
        Point(Params(temperature=1.0), 5, 2),
        Point(Params(temperature=1.0, top_k=2), 5, 2),
    ]
    found = branches(logits, points, 3)
    assert [line[0] for line in found] == choose(logits, points)
    assert found[0] == logits[0].topk(3).indices.tolist()
    assert found[2][2] == found[2][0]  # only two tokens are left


class Always:
    """Drafts the same tree everywhere: tokens 3, 4, 5, each followed by each."""

    cost = 0.1

    def bind(self, *_):
        pass

    def close(self):
        pass

    def forget(self, key):
        pass

    def propose(self, asks):
        return [Draft.merged([(a, b) for a in self.tokens for b in self.tokens], ask.limit) for ask in asks]


@pytest.mark.parametrize("drafter", [None, Always()], ids=["plain", "tree"])
def test_sampled_text_has_the_distribution_of_the_model(drafter):
    """The joint distribution of two tokens, against the model's own probabilities."""
    model, _ = tiny("mamba2")
    ids, number = prompts()[2], 900
    params = Params(max_tokens=2, temperature=1.0, top_k=3, n=number, seed=4)

    def kept(more):
        logits = model(input_ids=torch.tensor([ids + more]), use_cache=False).logits[0, -1].detach()
        logs, tokens = filtered(logits[None], Filters(*(torch.tensor([v]) for v in (1.0, 3, 1.0, 0.0))))
        return {int(token): float(log.exp()) for token, log in zip(tokens[0], logs[0], strict=True)}

    wanted = {(a, b): p * q for a, p in kept([]).items() for b, q in kept([a]).items()}
    if drafter is not None:
        drafter.tokens = list(dict.fromkeys(token for pair in wanted for token in pair))[:2]
    with engine(model, slots=16, drafter=drafter, max_draft=8) as served:
        request = served.generate(ids, params)[0]
        assert served.counters.prompt == len(ids)
    found = [tuple(sample.tokens) for sample in request.samples]
    counts = torch.tensor([found.count(pair) for pair in wanted])
    assert counts.sum() == number
    assert abs(chi_square(counts, torch.tensor(list(wanted.values())))) < 4


OPTIONS = {
    "temperature": {"temperature": 0.9},
    "filters": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "greedy penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_same_text_whoever_drafts(options):
    model, _ = tiny()
    params = [Params(max_tokens=8 + i, seed=i, n=2, **options) for i in range(4)]
    with engine(model, slots=8) as served:
        plain = [[sample.tokens for sample in r.samples] for r in served.generate(prompts(), params)]
    known = {tuple(ids): line[0] for ids, line in zip(prompts(), plain, strict=True)}
    for drafter in (Oracle(known), Oracle(known, branching=True), PromptLookup(least=1), DraftModel(tiny("mamba2")[0])):
        with engine(model, drafter=drafter, max_draft=6, slots=2) as served:
            again = [[sample.tokens for sample in r.samples] for r in served.generate(prompts(), params)]
            # What penalties leave seldom came before.
            assert served.counters.drafted or isinstance(drafter, PromptLookup)
        assert again == plain


def test_seeds():
    model, _ = tiny()
    with engine(model, seed=1) as served:
        draw = Params(max_tokens=8, temperature=1.5)
        first, second = (served.generate(prompts()[2], draw)[0].tokens for _ in range(2))
        fixed = Params(max_tokens=8, temperature=1.5, seed=3)
        third, fourth = (served.generate(prompts()[2], fixed)[0].tokens for _ in range(2))
        many = served.generate(prompts()[2], Params(max_tokens=8, temperature=1.5, seed=3, n=5))[0]
    assert first != second
    assert third == fourth == many.samples[0].tokens
    assert len({tuple(sample.tokens) for sample in many.samples}) == 5
    with engine(model, seed=1) as served:
        assert served.generate(prompts()[2], draw)[0].tokens == first


def test_greedy_and_sampled_rows_share_a_batch():
    model, wanted = tiny()
    params = lengthy()
    params[1] = Params(max_tokens=9, temperature=1.0)
    with engine(model, slots=4) as served:
        got = texts(served.generate(prompts(), params))
    assert [got[i] for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -1}, {"top_k": -1}, {"n": 0}, {"max_tokens": 0},
     {"repetition_penalty": 0}, {"logprobs": -1}, {"seed": -1}, {"stop": ["a", ""]}, {"stop": [3]},
     {"stop_tokens": ["a"]}, {"stop_tokens": [-1]}, {"top_k": 2**70}, {"temperature": float("inf")},
     {"temperature": float("nan")}, {"presence_penalty": float("nan")}, {"frequency_penalty": float("inf")}],
)  # fmt: skip
def test_params_out_of_range(options):
    with pytest.raises(ReplayError, match=next(iter(options))):
        Params(**options)


def test_random_numbers_of_others_are_left_alone():
    model, _ = tiny()
    torch.manual_seed(7)
    random.seed(7)
    with engine(model) as served:
        served.generate(prompts(), Params(max_tokens=3, temperature=1.0))
    first = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(1))
