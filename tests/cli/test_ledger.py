"""The counts of `--stats` against the calls that the core really received."""

import pytest
import torch
from cli_model import TEXT

from replayssm import ReplayCache, models
from replayssm.cli.ledger import Ledger
from replayssm.integrations.transformers import attach, pool
from replayssm.plan.traffic import Traffic, entry_bytes, fold, replay_read


class Calls:
    """Every step and fold of the core, with the bytes that each moves."""

    def __init__(self, monkeypatch):
        self.steps = self.folds = 0
        self.moved = Traffic()
        step, commit = pool.step, ReplayCache.commit

        def counted_step(layer, inputs, rows):
            layout, tokens = layer.cache.layout, int(rows.offsets[-1])
            self.steps += layer.index == 0
            self.moved += replay_read(layout, int(layer.cache.length[0]))
            self.moved += Traffic(write=sum(entry_bytes(layout).values()) * tokens)
            return step(layer, inputs, rows)

        def counted_commit(cache, rows, accepted):
            folds, entries = int(cache.folds[0]), int(cache.length[0]) + accepted[0]
            commit(cache, rows, accepted)
            if int(cache.folds[0]) > folds:
                self.folds += 1
                self.moved += fold(cache.layout, entries) * cache.layers

        monkeypatch.setattr(pool, "step", counted_step)
        monkeypatch.setattr(ReplayCache, "commit", counted_commit)


@pytest.mark.parametrize("prompt", ["t", "the", TEXT])
@pytest.mark.parametrize("drafts", [0, 3])
def test_counts_are_what_happened(hybrid, monkeypatch, prompt, drafts):
    model, tokenizer = models.load(hybrid)
    attach(model, window=12, max_draft=drafts + 1)
    calls = Calls(monkeypatch)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    options = {"prompt_lookup_num_tokens": drafts} if drafts else {}
    with Ledger(model) as ledger:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False, pad_token_id=0, **options
        )
    (track,) = ledger.tracks
    assert (track.steps, track.folds, track.moved) == (calls.steps, calls.folds, calls.moved)
    report = ledger.report(ids.shape[1], out.shape[1] - ids.shape[1])
    assert report["tokens"] == 50
    assert report["folds"] == calls.folds >= 3
    assert report["model_steps"] + report["drafts"]["accepted"] == 50
    if not drafts:
        assert report["drafts"] == {"proposed": 0, "accepted": 0}
    assert 0 < report["prompt_seconds"] < report["seconds"]
    sizes, layout = report["sequence_bytes"], track.layout
    assert sizes["checkpoint"] + sizes["buffer"] == track.layers * layout.slot_bytes
    # Keys and values of one attention layer, two heads of 16, for every token that was fed (the last one was not).
    assert sizes["kv"] == 2 * 2 * 16 * 4 * (ids.shape[1] + 49)
