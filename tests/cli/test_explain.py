import json

import pytest
import typer
from typer.testing import CliRunner

from replayssm.cli.explain import explain
from replayssm.plan import shipped
from replayssm.plan.resolve import shipped_config


def run(*arguments: str):
    app = typer.Typer(add_completion=False)
    app.command()(explain)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def document(*arguments: str):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_model_prints(name):
    result = run(name)
    assert result.exit_code == 0, result.stderr
    assert name in result.stdout
    assert "Predictions, not measurements" in result.stdout


def test_tables_hold_the_sizes_times_and_counts():
    out = run("qwen3.5-4b", "--batch", "256", "--draft", "4").stdout
    for text in ("recurrent (GDN)", "32 heads 128×128, 16 groups", "2.00 MiB", "48.00 MiB", "128.00 MiB"):
        assert text in out
    assert "tokens/s over plain decode" in out
    assert "with a snapshot per token" in out
    assert "NVIDIA H200 SXM" in out


def test_json_is_one_document():
    found = document("qwen3.5-4b", "--batch", "1", "--batch", "256", "--context", "1000", "--window", "8")
    assert [row["batch"] for row in found["predictions"]] == [1, 256]
    assert found["predictions"][1]["recurrent_speedup"] > 1.5
    assert found["bytes_per_sequence"]["state"] == 24 * 32 * 128 * 128 * 4
    assert found["bytes_per_sequence"]["kv"] == 1000 * 8 * 2 * 4 * 256 * 2
    assert found["setting"] | {"window": 8, "context": 1000, "checkpoint": "float32"} == found["setting"]
    assert found["best_window"]["window"] == 20


def test_precision_names_checkpoint_and_read_copy():
    wide, half = document("kimi-linear-48b-a3b"), document("kimi-linear-48b-a3b", "--precision", "fp32+bf16")
    assert half["setting"]["read_copy"] == "bfloat16"
    assert half["recurrent_bytes_per_token"]["replay"] < wide["recurrent_bytes_per_token"]["replay"]
    assert half["recurrent_bytes_per_token"]["conventional"] == wide["recurrent_bytes_per_token"]["conventional"]


def test_presets_by_name():
    found = document("qwen3.5-4b", "--precision", "fp16sr+nvfp4")["setting"]
    assert (found["precision"], found["checkpoint"], found["read_copy"]) == ("fp16sr+nvfp4", "float16", "nvfp4")
    wide, half = document("qwen3.5-4b"), document("qwen3.5-4b", "--precision", "int8")
    state = wide["bytes_per_sequence"]["state"]
    assert half["bytes_per_sequence"]["state"] == state // 4 + state // 128  # a float32 scale per row of 128


def test_auto_takes_the_fastest_within_the_error():
    small = document("qwen3.5-4b", "--precision", "auto", "--batch", "1")["setting"]
    assert (small["precision"], small["auto"]) == ("fp32", {"batch": 1, "allowed": "close", "error": "exact"})
    large = document("qwen3.5-4b", "--precision", "auto", "--error", "coarse")["setting"]
    assert (large["precision"], large["auto"]["batch"]) == ("fp32+nvfp4", 512)
    out = run("qwen3.5-4b", "--precision", "auto", "--batch", "512").stdout
    assert "Precision for batch 512: fp32+fp8 (reads: close)." in out


def test_memory_against_snapshots():
    rows = document("nemotron-3-super-120b-a12b", "--draft", "4", "--memory-gb", "60")["memory"]["rows"]
    plain, drafts = rows
    assert (plain["draft"], drafts["draft"]) == (1, 4)
    assert plain["sequences"]["replay"] < plain["sequences"]["conventional"]
    assert drafts["sequences"]["replay"] > 3 * drafts["sequences"]["snapshots"]


def test_a_model_larger_than_the_gpu_says_so():
    found = document("nemotron-3-super-120b-a12b")
    assert not found["model"]["weights_fit"]
    assert found["memory"]["rows"][0]["sequences"] is None
    out = run("nemotron-3-super-120b-a12b").stdout
    assert "say --memory-gb" in out
    assert "do not fit" in out


def test_a_folder_and_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shipped_config("bamba-9b")))
    for path in (tmp_path, tmp_path / "config.json"):
        assert document(str(path))["bytes_per_sequence"] == document("bamba-9b")["bytes_per_sequence"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3.5-5b",), "did you mean 'qwen3.5-4b'"),
        (("zzz",), "Shipped: bamba-9b"),
        (("nowhere/config.json",), "no such file: nowhere/config.json"),
        (("qwen3.5-4b", "--gpu", "h20"), "did you mean 'h200'"),
        (("qwen3.5-4b", "--precision", "fp99"), "precision: got 'fp99', expected a checkpoint (fp64, fp32, bf16, "),
        (("qwen3.5-4b", "--precision", "auto", "--error", "none"), "error: got 'none', supported: 'exact', 'fine', "),
        (("qwen3.5-4b", "--draft", "17"), "17 drafts do not fit into window=16"),
    ],
)
@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_user_errors_are_one_line(arguments, message, extra):
    result = run(*arguments, *extra)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_unsupported_recurrence_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "falcon_mamba"}')
    result = run(str(tmp_path))
    assert result.exit_code == 2
    assert "'falcon_mamba': its recurrence is Mamba-1; supported are Mamba-2, GDN and KDA" in result.stderr


def test_the_readme_s_share_of_traffic():
    moved = document("qwen3.5-4b")["recurrent_bytes_per_token"]
    assert round(moved["replay"] / moved["conventional"], 2) == 0.61
