"""Greedy text from the engine is the text of ``model.generate`` alone: any batch, order, drafter and model."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from engine_tiny import INDEXED, SERVED, Oracle, boxed, engine, lengthy, prompts, solo, texts, tiny
from transformers_tiny import CONFIGS, noisy, stock

from replayssm import ReplayError
from replayssm.engine import DraftModel, Engine, Params, PromptLookup, SuffixLookup
from replayssm.integrations.transformers import attach, detach


@pytest.mark.parametrize("name", [*SERVED, "llama"])
def test_greedy_of_every_model(name):
    model, wanted = tiny(name)
    with engine(model) as plain:
        assert texts(plain.generate(prompts(), lengthy())) == wanted
        assert plain.counters.forwards < sum(map(len, wanted))
        plain.runner.model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)  # a bound model serves others as before
    known = dict(zip(map(tuple, prompts()), wanted, strict=True))
    for branching in (False, True):
        with engine(model, drafter=Oracle(known, branching), max_draft=6) as drafting:
            assert texts(drafting.generate(prompts(), lengthy())) == wanted
            assert 0 < drafting.counters.accepted < drafting.counters.drafted
            assert drafting.counters.forwards < plain.counters.forwards


@pytest.mark.parametrize("name", INDEXED)
def test_models_that_keep_more_than_keys_and_values_are_named(name):
    model = stock(name)
    with pytest.raises(ReplayError, match="indexer is not supported"):
        engine(model)
    attach(model)  # nothing is left bound


def test_other_recurrences_are_named():
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mamba"](**CONFIGS["unsupported"]["mamba"])).eval()
    with pytest.raises(ReplayError, match="Mamba-1"):
        engine(model)


def test_training_models_are_refused():
    model = stock("mamba2").train()
    with pytest.raises(ReplayError, match=r"call model.eval\(\) first"):
        engine(model)


def test_attached_or_bound_models_are_refused():
    model = attach(stock("mamba2"))
    with pytest.raises(ReplayError, match="is attached"):
        engine(model)
    detach(model)
    with engine(model), pytest.raises(ReplayError, match="another engine"):
        engine(model)
    engine(model).close()


@cache
def boxed_texts():
    model, tokenizer, found = boxed()
    ids = [tokenizer(text)["input_ids"][: 40 + 23 * i] for i, text in enumerate(found[:5])]
    return model, tokenizer, ids, [solo(model, each, 24) for each in ids]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: None,
        lambda model: PromptLookup(),
        lambda model: PromptLookup(branches=3),
        lambda model: SuffixLookup(),
        lambda model: DraftModel(noisy(model, 0.05)),
        lambda model: DraftModel(noisy(model, 0.05), branches=(2, 1)),
    ],
    ids=["none", "ngram", "ngram tree", "suffix", "model", "model tree"],
)
def test_boxed_model_with_every_drafter(make):
    model, tokenizer, ids, wanted = boxed_texts()
    with Engine(model, tokenizer, slots=3, max_length=256, chunk=32, drafter=make(model)) as served:
        requests = served.generate(ids, Params(max_tokens=24))
        assert texts(requests) == wanted
        assert [r.text for r in requests] == tokenizer.batch_decode(wanted, skip_special_tokens=True)
        if served.drafter is not None:
            assert served.counters.accepted > 10
        assert sum(s.accepted + s.steps for r in requests for s in r.samples) >= served.counters.tokens


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_neither_order_nor_batch_matters(slots):
    model, wanted = tiny()
    order = [2, 0, 3, 1]
    with engine(model, slots=slots) as served:
        got = texts(served.generate([prompts()[i] for i in order], [lengthy()[i] for i in order]))
    assert got == [wanted[i] for i in order]


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_prompts_in_parts_beside_decoding(chunk):
    model, wanted = tiny("nemotron_h")
    with engine(model, chunk=chunk) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted


@pytest.mark.parametrize(("window", "max_draft"), [(1, 1), (4, 4), (16, 3)])
def test_windows(window, max_draft):
    model, wanted = tiny("kimi_linear")
    known = dict(zip(map(tuple, prompts()), wanted, strict=True))
    with engine(model, window=window, max_draft=max_draft, drafter=Oracle(known)) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted


def test_a_window_for_the_device_and_the_drafts():
    model, _ = tiny("kimi_linear")
    for max_draft, window in ((1, 16), (4, 19)):
        with Engine(model, slots=1, max_draft=max_draft) as served:
            assert {pool.layout.window for pool in served.runner.pools} == {window}


def test_memory_instead_of_slots():
    model, wanted = tiny()
    with engine(model, slots=1) as one:
        size = one.runner.slot_bytes
    with engine(model, slots=None, memory=3 * size + 5) as served:
        assert served.runner.slots == 3
        assert served.runner.bytes >= 3 * size
        assert texts(served.generate(prompts(), lengthy())) == wanted
    with pytest.raises(ReplayError, match=f"one sequence takes {size} bytes"):
        engine(model, slots=None, memory=size - 1)


def test_what_cannot_fit_is_refused_before_anything_runs():
    model, _ = tiny()
    with engine(model) as served:
        few = Params(max_tokens=4)
        for ids, params, match in [
            ([], few, "at least one token"),
            ([5] * 60, Params(max_tokens=5), "do not fit into max_length=64"),
            ([5, 4000], few, "expected token ids"),
            ([5], Params(max_tokens=4, logprobs=200), "logprobs: expected at most 128"),
            ("text", few, "needs the engine's tokenizer"),
            ([5], Params(max_tokens=4, stop="x"), "need the engine's tokenizer"),
        ]:
            with pytest.raises(ReplayError, match=match):
                served.generate([[5, 6], ids], params)
            served.step()
            assert served.idle
        assert served.generate(torch.tensor([5, 6]), few)[0].tokens == served.generate([5, 6], few)[0].tokens
        full = served.generate([[5] * 60], Params(max_tokens=None))[0]
        assert (len(full.tokens), full.samples[0].finish) == (4, "length")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": 1, "memory": 10}, "not both"),
        ({"max_draft": 9}, "max_draft"),
        ({"chunk": 0}, "chunk"),
        ({"prefix_memory": -1}, "prefix_memory"),
    ],
)
def test_numbers_out_of_range(options, match):
    model, _ = tiny()
    with pytest.raises(ReplayError, match=match):
        engine(model, **options)
    engine(model).close()


def test_a_draft_model_must_have_the_vocabulary():
    model, _ = tiny()
    other, _, _ = boxed()
    with pytest.raises(ReplayError, match="the draft model has 4096 tokens"):
        engine(model, drafter=DraftModel(other))
    engine(model).close()


def test_draft_models_out_of_range():
    for options, match in (({"branches": ()}, "branches"), ({"branches": (0,)}, "branches"), ({"cost": 1.0}, "cost")):
        with pytest.raises(ReplayError, match=match):
            DraftModel(tiny()[0], **options)


def test_end_of_text_ends_the_text():
    model, _ = tiny()
    wanted = solo(model, prompts()[2], 8)
    model.generation_config.eos_token_id = [wanted[3], 1]
    try:
        with engine(model) as served:
            ended = served.generate(prompts()[2], Params(max_tokens=8))[0]
            assert (ended.tokens, ended.samples[0].finish) == (wanted[: wanted.index(wanted[3]) + 1], "stop")
            assert served.generate(prompts()[2], Params(max_tokens=8, ignore_eos=True))[0].tokens == wanted
    finally:
        model.generation_config.eos_token_id = None


def test_logprobs_are_those_of_the_whole_text():
    model, wanted = tiny()
    with engine(model, drafter=Oracle({tuple(prompts()[3]): wanted[3]}), max_draft=4) as served:
        request = served.generate(prompts()[3], Params(max_tokens=11, logprobs=2))[0]
    whole = torch.tensor([prompts()[3] + wanted[3]])
    logs = model(input_ids=whole, use_cache=False).logits[0].log_softmax(-1)[20:-1]
    got = torch.tensor([entry.value for entry in request.samples[0].logprobs])
    torch.testing.assert_close(got, logs.gather(1, whole[0, 21:, None])[:, 0], rtol=1e-3, atol=1e-4)
    assert [entry.top[0][0] for entry in request.samples[0].logprobs] == wanted[3]


def test_the_engine_is_for_the_cpu():
    model = deepcopy(tiny("qwen3_5_text")[0]).to("meta")
    with pytest.raises(ReplayError, match=r"^model: the engine runs on the CPU and on CUDA, and the model is on meta"):
        Engine(model, slots=1)
