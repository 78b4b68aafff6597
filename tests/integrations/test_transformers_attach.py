"""attach changes one instance, detach undoes it, and what cannot be replayed says so."""

import copy
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers_tiny import CONFIGS, NAMES, ONE_EACH, attached, feed, generate, new_cache, prompt, stock

from replayssm import Precision, ReplayError
from replayssm.integrations.transformers import attach, detach


def classes(model):
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("name", NAMES)
def test_detach_leaves_nothing(name):
    model = stock(name)
    before = classes(model), [sorted(vars(m)) for m in model.modules()], generate(model, prompt(1, 5), 8)
    modeling = sys.modules[type(model).__module__]
    globals_before = dict(vars(modeling))
    assert attach(model) is model
    assert classes(model) != before[0]
    generate(model, prompt(1, 5), 4)
    detach(model)
    assert classes(model) == before[0]
    assert [sorted(vars(m)) for m in model.modules()] == before[1]
    assert dict(vars(modeling)) == globals_before
    assert torch.equal(generate(model, prompt(1, 5), 8), before[2])


@pytest.mark.parametrize("name", ONE_EACH)
def test_other_instances_are_untouched(name):
    other = stock(name)
    before = classes(other)
    model = attached(name)
    assert classes(other) == before
    assert all(isinstance(ours, theirs) for ours, theirs in zip(model.modules(), before, strict=True))
    cache = new_cache(other)
    feed(other, prompt(1, 4), cache)
    assert not any(hasattr(layer, "pool") for layer in cache.layers)


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_copy_of_an_attached_model_is_attached(name):
    model = attached(name)
    twin = copy.deepcopy(model)
    detach(model)
    wanted = generate(model, prompt(1, 5))
    assert torch.equal(generate(twin, prompt(1, 5)), wanted)
    detach(twin)


@pytest.mark.parametrize("name", ONE_EACH)
def test_decode_is_replayed(name, monkeypatch):
    """Not the stock path by accident: a decode step calls ``step`` once a layer and writes no state."""
    from replayssm.integrations.transformers import pool

    calls, step = [], pool.step
    monkeypatch.setattr(pool, "step", lambda *args: (calls.append(1), step(*args))[1])
    model = attached(name)
    cache = new_cache(model)
    feed(model, prompt(1, 9), cache)
    assert not calls
    for token in range(1, 4):
        feed(model, prompt(1, 1), cache)
        held = [layer.pool for layer in cache.layers if getattr(layer, "pool", None)]
        assert len(calls) == token * len(held)
        assert held[0].cache.length.tolist() == [token - 1]


@pytest.mark.parametrize("name", CONFIGS["unsupported"])
def test_other_recurrences_raise(name):
    config = CONFIG_MAPPING[name](**CONFIGS["unsupported"][name])
    model = AutoModelForCausalLM.from_config(config)
    recurrence = {"minimax": "lightning attention", "recurrent_gemma": "RG-LRU", "rwkv": "RWKV"}.get(name, "Mamba-1")
    with pytest.raises(ReplayError, match=rf"{type(model).__name__}: .*\({recurrence}\).*Gated DeltaNet \(qwen3_next"):
        attach(model)


def test_a_model_without_recurrence_raises():
    with pytest.raises(ReplayError, match="LlamaForCausalLM: has no recurrent layers; supported"):
        attach(stock("llama"))


def test_a_model_with_one_unsupported_layer_raises():
    model = torch.nn.ModuleList(
        [
            stock("qwen3_next"),
            AutoModelForCausalLM.from_config(CONFIG_MAPPING["mamba"](**CONFIGS["unsupported"]["mamba"])),
        ]
    )
    before = classes(model)
    with pytest.raises(ReplayError, match=r"ModuleList: cannot replay MambaMixer \(Mamba-1\)"):
        attach(model)
    assert classes(model) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window: expected at least 1"),
        ({"max_draft": 0}, "max_draft: expected at least 1"),
        ({"window": 4, "max_draft": 5}, "max_draft: 5 drafts do not fit into window=4"),
        ({"precision": "fp32"}, "precision: expected a Precision"),
    ],
)
def test_settings_are_checked(settings, message):
    model = stock("qwen3_next")
    with pytest.raises(ReplayError, match=message):
        attach(model, **settings)
    attach(model)


def test_attaching_and_detaching_twice():
    model = attached("qwen3_next")
    with pytest.raises(ReplayError, match="is attached already"):
        attach(model)
    detach(model)
    with pytest.raises(ReplayError, match="is not attached"):
        detach(model)


def test_a_wrapped_mixer_raises():
    model = stock("qwen3_next")
    mixer = model.model.layers[1].linear_attn
    mixer.forward = mixer.forward
    before = classes(model)
    with pytest.raises(ReplayError, match="Qwen3NextGatedDeltaNet: its forward is wrapped already"):
        attach(model)
    assert classes(model) == before


@pytest.mark.parametrize("name", ONE_EACH)
def test_precision_reaches_the_state(name):
    model = attached(name, precision=Precision(checkpoint="bf16", rounding="stochastic"))
    cache = new_cache(model)
    feed(model, prompt(1, 9), cache)
    feed(model, prompt(1, 1), cache)
    assert cache.layers[0].pool.cache.views()[0]["checkpoint"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ONE_EACH)
def test_training_is_stock(name):
    """Without a cache every gradient is there; a replayed step has none and says so."""
    ids = prompt(2, 12)
    gradients = []
    for model in (stock(name), attached(name)):
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    model = attached(name)
    cache = new_cache(model)
    feed(model, ids, cache)
    logits = feed.__wrapped__(model, ids[:, :1], cache)
    with pytest.raises(ReplayError, match="no gradient"):
        logits.sum().backward()
