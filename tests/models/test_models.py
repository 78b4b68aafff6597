"""Shipped models by name, folders by path, nothing from elsewhere."""

import json
import socket

import pytest
import torch

from replayssm import ReplayError, models

CONFIG = {
    "vocab_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": None,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of shipped models with one in it, `tiny_gdn`, and held-out text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    folder = tmp_path / "tiny_gdn"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    held = tmp_path / "heldout"
    held.mkdir()
    (held / "one.txt").write_text("first\n<|endoftext|>\nsecond — two", encoding="utf-8")
    (held / "two.txt").write_text("third", encoding="utf-8")
    (held / "index.json").write_text(json.dumps([{"name": n, "file": f"{n}.txt"} for n in ("one", "two")]))
    monkeypatch.setattr(models, "_HERE", tmp_path)
    monkeypatch.setattr(models, "_CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setattr(models, "_HELDOUT", held)
    return tmp_path


def test_names_and_paths(shelf):
    assert models.names() == ("tiny_gdn",)
    assert models.path("tiny_gdn") == models.path("Tiny-GDN") == shelf / "tiny_gdn"
    assert models.resolve("tiny_gdn") == models.resolve(shelf / "tiny_gdn") == shelf / "tiny_gdn"


def test_errors_say_what_there_is(shelf):
    with pytest.raises(ReplayError, match=r"no model 'tiny_gnd' \(did you mean 'tiny_gdn'\?\): .* one of tiny_gdn"):
        models.path("tiny_gnd")
    with pytest.raises(ReplayError, match=r"no model 'meta/llama': expected a folder with a config\.json"):
        models.resolve("meta/llama")
    with pytest.raises(ReplayError, match=r"heldout: holds no model \(no config.json\)"):
        models.resolve(shelf / "heldout")


def test_a_checkout_has_the_models_of_the_repository(shelf, monkeypatch):
    with pytest.raises(ReplayError, match=r"'docs_kda' is not in the installed package.* models/docs_kda; .* tiny_gdn"):
        models.resolve("Docs-KDA")
    checkout = shelf / "checkout"
    (checkout / "models").mkdir(parents=True)
    (shelf / "tiny_gdn").rename(checkout / "models" / "docs_kda")
    monkeypatch.setattr(models, "_CHECKOUT", checkout)
    assert models.names() == ()  # a folder named so beside an installed package means nothing
    (checkout / "pyproject.toml").touch()
    assert models.names() == ("docs_kda",)
    assert models.path("docs-kda") == checkout / "models" / "docs_kda"


def test_load_opens_no_connection(shelf, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, tokenizer = models.load("tiny_gdn")
    assert tokenizer("a b")["input_ids"] == [0, 1]
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert models.load(shelf / "tiny_gdn", dtype=torch.float32)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b'{"model_type": "no_such_thing"}', "transformers cannot load it: "),
        ("config.json", b"{", "transformers cannot load it: "),
        ("model.safetensors", b"\x00" * 64, "transformers cannot load it: SafetensorError"),
        ("model.safetensors", None, "transformers cannot load it: OSError"),
        ("tokenizer.json", None, "transformers cannot load it: "),
    ],
)
def test_a_broken_folder_is_a_short_error(shelf, file, content, message):
    target = shelf / "tiny_gdn" / file
    target.unlink()
    if content is not None:
        target.write_bytes(content)
    with pytest.raises(ReplayError, match=message) as raised:
        models.load("tiny_gdn")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(shelf / "tiny_gdn"))


def test_heldout(shelf):
    assert models.heldout_sources() == {name: shelf / "heldout" / f"{name}.txt" for name in ("one", "two")}
    assert models.heldout("one") == ["first", "second — two"]
    assert models.heldout() == ["first", "second — two", "third"]
    with pytest.raises(ReplayError, match="no held-out source 'three': expected one of one, two"):
        models.heldout("three")


def test_what_ships():
    assert models.DEFAULT in models.names()
    sources = models.heldout_sources()
    assert sources.keys() == {"rust", "python", "stdlib", "postgresql", "boost"}
    assert sum(file.stat().st_size for file in sources.values()) > 1_000_000
    model, tokenizer = models.load(models.DEFAULT)
    assert model.dtype == torch.bfloat16
    assert 5e6 < sum(p.numel() for p in model.parameters()) < 6e6
    assert tokenizer.vocab_size == model.config.vocab_size == 4096
    text = models.heldout("python")[0][:1000]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    bits = loss * (ids.shape[1] - 1) / len(text.encode()) / 0.6931
    assert bits < 2.2  # from an empty past; the model card has the number over all held-out text
