"""The models that only the repository has: loaded by plain transformers, attached, measured."""

import sys
from pathlib import Path

import pytest
import torch

from replayssm import models
from replayssm.integrations.transformers import attach

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "training"))

import score  # noqa: E402

# Types in transformers, and bits per byte of the first 1024 held-out tokens of the Python pages (float32, CPU)
MODELS = {"docs_mamba2": ("nemotron_h", 1.253), "docs_kda": ("kimi_linear", 1.322)}


@pytest.fixture(params=MODELS, scope="module")
def loaded(request):
    """Name, model in float32 and its tokenizer."""
    return request.param, *models.load(request.param, dtype=torch.float32)


def test_they_are_outside_the_package():
    assert set(models.REPOSITORY) == set(MODELS)
    for name in MODELS:
        assert models.path(name) == ROOT / "models" / name
        assert sum(file.stat().st_size for file in models.path(name).iterdir()) < 10.2e6
        assert (models.path(name) / "model.safetensors").stat().st_size < 10e6


def test_sizes_and_types(loaded):
    name, model, tokenizer = loaded
    assert model.config.model_type == MODELS[name][0]
    assert 4.7e6 < sum(p.numel() for p in model.parameters()) < 4.9e6
    assert tokenizer.vocab_size == model.config.vocab_size == 4096
    own = models.path(models.DEFAULT) / "tokenizer.json"
    assert (models.path(name) / "tokenizer.json").read_bytes() == own.read_bytes()


def test_they_predict_heldout_text(loaded):
    name, model, tokenizer = loaded
    parts = score.load_heldout(Path(models.__file__).parent / "heldout", tokenizer)
    tokens, size = parts["python"]
    bits = score.bits_per_byte(model, tokens, size, length=1024, limit=1024)
    assert bits == pytest.approx(MODELS[name][1], abs=0.01)


def test_attached_decode_equals_stock(loaded):
    name, model, tokenizer = loaded
    text = models.heldout("python")[0][:600]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 48, "do_sample": False}
    expected = model.generate(ids, **options)
    assert expected.shape[1] > ids.shape[1] + 8
    other = attach(models.load(name, dtype=torch.float32)[0])
    assert torch.equal(other.generate(ids, **options), expected)
    assert torch.equal(other.generate(ids, prompt_lookup_num_tokens=4, **options), expected)
