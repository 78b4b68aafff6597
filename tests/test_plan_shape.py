import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from replayssm import ReplayError
from replayssm.layout import GDN, KDA, MAMBA2
from replayssm.plan import ModelShape, resolve, shipped
from replayssm.plan.families import FAMILIES, OTHER_RECURRENCES
from replayssm.plan.resolve import shipped_config
from replayssm.plan.traffic import state_bytes

MIB = 1024 * 1024


def transformers_config(name: str, **changes):
    transformers = pytest.importorskip("transformers")
    raw = {**shipped_config(name), **changes}
    keep = {key: value for key, value in raw.items() if key not in ("model_type", "source")}
    return transformers.AutoConfig.for_model(raw["model_type"], **keep)


def test_qwen3_5_4b_by_hand():
    shape = resolve("qwen3.5-4b")
    assert [block.kind for block in shape.blocks[:8]] == ["recurrent", "mlp"] * 3 + ["attention", "mlp"]
    assert len(shape.layouts) == 24
    assert sum(map(state_bytes, shape.layouts)) == 24 * 32 * 128 * 128 * 4
    hidden = 2560
    gdn = hidden * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32) + (2 * 16 * 128 + 32 * 128) * 4
    attention = hidden * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * hidden
    assert shape.params_total == 24 * gdn + 8 * attention + 32 * 3 * hidden * 9216 + 248320 * hidden
    assert shape.params_active == shape.params_total  # dense, and the tied table is read as the output projection


def test_nemotron_3_super_by_hand():
    shape = resolve("nemotron-3-super-120b-a12b")
    assert [shape.layouts.count(shape.layouts[0]), len(shape.blocks)] == [40, 88]
    assert state_bytes(shape.layouts[0]) == 4 * MIB
    moe = next(block for block in shape.blocks if block.kind == "moe")
    assert moe.expert_params == 2 * 1024 * 2688
    assert moe.params == 2 * 4096 * 5376 + 4096 * 512 + 2 * 4096 * 1024
    assert shape.params_total == pytest.approx(120.67e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "recurrence", "layers", "sizes"),
    [
        ("qwen3.5-122b-a10b", GDN, 36, (64, 16, 128, 128)),
        ("qwen3-next-80b-a3b", GDN, 36, (32, 16, 128, 128)),
        ("olmo-hybrid-7b", GDN, 24, (30, 30, 192, 96)),
        ("lara-4-mini", GDN, 14, (16, 8, 128, 128)),
        ("nemotron-3-nano-30b-a3b", MAMBA2, 23, (64, 8, 64, 128)),
        ("nemotron-3-nano-4b", MAMBA2, 21, (96, 8, 80, 128)),
        ("granite-4.0-h-small", MAMBA2, 36, (128, 1, 64, 128)),
        ("falcon-h1-34b", MAMBA2, 72, (32, 2, 128, 256)),
        ("bamba-9b", MAMBA2, 29, (128, 1, 64, 128)),
        ("mamba-codestral-7b", MAMBA2, 64, (128, 8, 64, 128)),
        ("kimi-linear-48b-a3b", KDA, 20, (32, 32, 128, 128)),
        ("glm-5.3-flash", KDA, 34, (64, 64, 128, 128)),
        ("ling-3.0-flash", KDA, 35, (32, 32, 128, 128)),
    ],
)
def test_published_recurrences(name, recurrence, layers, sizes):
    layouts = resolve(name).layouts
    assert len(layouts) == layers
    assert {(one.recurrence, one.heads, one.groups, one.head_dim, one.state_dim) for one in layouts} == {
        (recurrence, *sizes)
    }


@pytest.mark.parametrize("name", shipped())
def test_shipped_config_builds_with_its_transformers_class_and_reads_the_same(name):
    assert ModelShape.from_config(transformers_config(name), name) == replace(resolve(name), source="")


@pytest.mark.parametrize("name", shipped())
def test_weights_equal_those_of_the_transformers_model(name):
    transformers = pytest.importorskip("transformers")
    # The published Qwen4-Exp sizes its indexer itself; the class cannot be built without.
    indexer = {"n_heads": 4, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 16}
    changes = {f"indexer_{key}": value for key, value in indexer.items()} if name == "qwen4-exp" else {}
    config = transformers_config(name, **changes)
    shape = ModelShape.from_config(config)
    headless = shape.model_type == "glm5_next_text"  # its text model has no class with an output projection
    model_class = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = model_class.from_config(config)
    counted = shape.params_total - (shape.head_params if headless else 0)
    assert counted == pytest.approx(sum(p.numel() for p in model.parameters()), rel=2e-3)


def test_every_supported_architecture_ships_a_config():
    assert {resolve(name).model_type.removesuffix("_text") for name in shipped()} | {"qwen3_5"} == set(FAMILIES)


def test_nested_text_config_and_folder(tmp_path):
    raw = shipped_config("qwen3.5-4b")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": raw}))
    shape = resolve(str(tmp_path))
    assert shape.name == tmp_path.name
    assert shape.blocks == resolve("Qwen/Qwen3.5-4B").blocks == resolve(str(tmp_path / "config.json")).blocks


def test_legacy_spellings_of_layer_types():
    raw = shipped_config("nemotron-3-nano-4b")
    modern = raw.pop("layers_block_type")
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    words = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}
    pattern = ModelShape.from_config({**raw, "hybrid_override_pattern": "".join(letters[kind] for kind in modern)})
    legacy = ModelShape.from_config({**raw, "layers_block_type": [words[kind] for kind in modern]})
    assert pattern.blocks == legacy.blocks == resolve("nemotron-3-nano-4b").blocks


@pytest.mark.parametrize(("model_type", "recurrence"), OTHER_RECURRENCES.items())
def test_other_recurrences_are_named(model_type, recurrence):
    with pytest.raises(ReplayError, match=recurrence) as raised:
        ModelShape.from_config({"model_type": model_type})
    assert model_type in str(raised.value)
    assert "qwen3_5" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "`model_type` is missing"),
        ({"model_type": "llama"}, "no recurrence known"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"linear_num_key_heads": None}, "`linear_num_key_heads` is missing"),
        ({"vocab_size": "many"}, "whole number"),
        ({"layer_types": ["linear_attention", "magic"]}, "unknown layer type 'magic'"),
        ({"layer_types": ["hybrid"]}, "no layer type 'hybrid'"),
        ({"linear_num_value_heads": 24}, "do not divide"),
    ],
)
def test_broken_configs_say_what_is_wrong(change, message):
    with pytest.raises(ReplayError, match=message):
        ModelShape.from_config({**shipped_config("qwen3.5-4b"), **change})


def test_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        resolve(str(tmp_path))
    for text, message in (("{", "not readable"), ("[]", "expected a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ReplayError, match=message):
            resolve(str(tmp_path))
    with pytest.raises(ReplayError, match=r"did you mean 'qwen3\.5-4b'"):
        resolve("qwen3.5-5b")


def test_sliding_and_indexed_attention_read_a_bounded_number_of_tokens():
    sliding = next(block for block in resolve("lara-4-mini").blocks if block.kind == "sliding")
    assert (sliding.kv_kept(10_000), sliding.kv_read(10_000)) == (512 * 2 * 4 * 128,) * 2
    sparse = next(block for block in resolve("glm-5.3-flash").blocks if block.kind == "mla")
    assert (sparse.kv_kept(10_000), sparse.kv_read(10_000)) == (10_000 * 512, 2048 * 512)


def test_planning_imports_torch_only():
    code = "import sys, replayssm.plan as p; p.resolve('qwen3.5-4b'); print(*(m.split('.')[0] for m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "typer", "rich", "pydantic", "safetensors"} & set(found)
