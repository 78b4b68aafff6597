"""A tiny hybrid model with random weights and a tokenizer whose characters span tokens, as a Hugging Face folder."""

import json
from pathlib import Path

import torch
from click.testing import Result

TEXT = "the quick brown fox jumps over the lazy dog — and then runs home ☃ " * 4
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": LAYERS,
}
CONFIGS = {
    "hybrid": ("qwen3_5_text", SIZES | ATTENTION | DELTA),
    "attention": ("llama", SIZES | ATTENTION),
    "rwkv": ("rwkv", {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64}),
}


def make(folder: Path, kind: str) -> Path:
    """Write a model and a byte-level tokenizer of 320 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    name, sizes = CONFIGS[kind]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<end>"])
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def error(result: Result) -> str:
    """The one line of a user error."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()
