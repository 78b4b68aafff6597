"""Whole steps of small models on the CPU: rows, schedules, sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from replayssm import ReplayError
from replayssm.bench import step as module
from replayssm.bench.models import MODELS, build, raw_config
from replayssm.bench.steady import Steady, Work, by_cycle
from replayssm.cli.main import build as build_app

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "tiny_configs.json").read_text())["supported"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"model_type": "nemotron_h", **CONFIGS["nemotron_h"]["config"]}))
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_published_sizes(name: str) -> None:
    assert bool(raw_config(name)[1]) == bool(MODELS[name].changes)
    with torch.device("meta"):
        model = build(name, "meta")
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    wanted = {"nemotron-3-nano-4b": 3.97, "qwen3.5-4b": 4.21, "kimi-linear-kda": 2.82, "falcon-h1-7b": 7.59}
    assert billions == pytest.approx(wanted[name], abs=0.01)
    assert build(name, "meta", 3).config.num_hidden_layers == 3  # type: ignore[union-attr]
    with pytest.raises(ReplayError, match=f"layers: {name} has"):
        build(name, "meta", 1000)


def test_a_schedule_and_its_cycle() -> None:
    work = Work(4, 16, draft=4, schedule=(4, 2, 3), window=32)
    assert work.accepted == 3
    assert work.cycle == 12
    assert Work(1, 1).cycle == 32
    assert by_cycle([1, 3, 5, 7, 9], 2) == [2, 6]
    with pytest.raises(ReplayError, match="expected numbers 1…4"):
        Work(4, 16, draft=4, schedule=(5,))


def test_every_sequence_moves_by_its_schedule(config: str) -> None:
    steady = Steady(build(config, "cpu", dtype=torch.float32), "replay", Work(3, 5, 3, (3, 1), window=16))
    try:
        pool = steady.runner.pools[0]
        pool._limit.fill_(pool.layout.room)
        for number in range(3):
            steady.step(number)
        assert pool.length.tolist() == [7, 5, 7]
    finally:
        steady.close()


def test_a_conventional_sequence_is_not_charged_for_a_window(config: str) -> None:
    model, found = build(config, "cpu", dtype=torch.float32), {}
    for way in ("conventional", "replay"):
        for window in (8, 32):
            steady = Steady(model, way, Work(2, 5, window=window))  # type: ignore[arg-type]
            found[way, window] = steady.runner.slot_bytes
            steady.close()
    assert found["conventional", 8] == found["conventional", 32] < found["replay", 8] < found["replay", 32]


@pytest.mark.parametrize(
    ("command", "keys"), [(["step", "--engine"], {"ms_engine"}), (["spec", "--accepted", "2"], {"ms_plain"})]
)
def test_rows(config: str, tmp_path: Path, command: list[str], keys: set[str]) -> None:
    out, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    options = ["--batch", "2", "--context", "8", "--cycles", "1", "--window", "6", "--device", "cpu", "--json"]
    files = ["--config", config, "--out", str(out), "--plot", str(plot)]
    done = CliRunner().invoke(build_app(), ["bench", *command, *options, *files], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())
    assert row["bench"] == command[0]
    assert {"ms", "ms_conventional", "gpu", "date", "torch", "commit", "sequence_bytes"} | keys <= set(row)
    assert all(row[key] > 0 for key in ("ms", "ms_conventional", *keys))
    assert row["layers"] is None
    assert plot.stat().st_size > 0


# Narrow layers of the same kinds; what a name of `MODELS` says about layers, experts and groups stays.
NARROW = {
    "nemotron-3-nano-4b": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "qwen3.5-4b": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "kimi-linear-kda": {
        "pad_token_id": 0,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [],
        },
    },
    "falcon-h1-7b": {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
}
# Recurrent layers, and numbers of a layer's state.
STATES = {
    "nemotron-3-nano-4b": (2, 8 * 12 * 16),
    "qwen3.5-4b": (3, 4 * 16 * 16),
    "kimi-linear-kda": (3, 4 * 16 * 16),
    "falcon-h1-7b": (3, 4 * 16 * 16),
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's models with narrow layers, under their own names."""
    for name, chosen in MODELS.items():
        sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, **NARROW[name]}
        monkeypatch.setitem(MODELS, name, replace(chosen, changes={**chosen.changes, **sizes}))


def bench(*words: str) -> tuple[Result, list[dict[str, Any]]]:
    """Run ``replayssm bench`` on the CPU with a short context; what it said, and its rows."""
    options = ["--context", "8", "--cycles", "1", "--window", "8", "--device", "cpu"]
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        done = CliRunner().invoke(build_app(), ["bench", *words, *options, "--out", str(out)], catch_exceptions=False)
        return done, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_every_way_to_read(name: str) -> None:
    precisions = ("float32", "float32+fp8", "float32+nvfp4", "fp16sr", "fp16sr+int8")
    asked = [word for precision in precisions for word in ("--precision", precision)]
    done, rows = bench("step", "--config", name, "--batch", "2", *asked)
    assert done.exit_code == 0, done.output
    assert [row["precision"] for row in rows] == ["fp32", "fp32+fp8", "fp32+nvfp4", "fp16sr", "fp16sr+int8"]
    assert not any("problems" in row for row in rows)
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["note"] == MODELS[name].note for row in rows)
    # The conventional way is the same for all of them: measured once, with float32 states.
    assert len({row["ms_conventional"] for row in rows}) == 1
    assert len({row["sequence_bytes"]["recurrent_conventional"] for row in rows}) == 1
    layers, numbers = STATES[name]
    each = [row["sequence_bytes"]["recurrent"] for row in rows]
    # A byte each, and a scale for sixteen of a row; two bytes fewer a written value where there are some.
    written = numbers // 16 if name in ("qwen3.5-4b", "kimi-linear-kda") else 0
    assert each[1] - each[0] == layers * (numbers + 4 * numbers // 16 - 8 * 2 * written)
    assert each[3] - each[0] == -layers * 2 * numbers


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_drafts(name: str) -> None:
    done, rows = bench("spec", "--config", name, "--batch", "2", "--draft", "3", "--accepted", "2", "--accepted", "1")
    assert done.exit_code == 0, done.output
    (row,) = rows
    assert (row["draft"], row["accepted"], row["cycle"]) == (3, 1.5, 4)
    assert row["tokens_per_second"] == pytest.approx(2 * 1.5 / row["ms"] * 1e3)
    assert row["ms_plain"] > 0
    _, (plain,) = bench("step", "--config", name, "--batch", "2")
    layers, numbers = STATES[name]
    states, one = (each["sequence_bytes"]["recurrent_conventional"] for each in (row, plain))
    assert 0 <= states - one - layers * 2 * 4 * numbers < layers * 2 * 4 * 400  # two states more, and convolution
    assert row["concurrency"] > plain["concurrency"]


def test_batches_of_a_step(config: str) -> None:
    done, rows = bench("step", "--config", config)
    assert done.exit_code == 0, done.output
    assert [row["batch"] for row in rows] == [1, 16, 64, 256, 512]
    assert all(row["ms"] > 0 and row["transformers"] for row in rows)


@pytest.mark.parametrize(("kind", "ways"), [("step", ["conventional"]), ("spec", ["conventional", "plain"])])
def test_what_does_not_fit_is_said(config: str, monkeypatch: pytest.MonkeyPatch, kind: str, ways: list[str]) -> None:
    init = Steady.__init__

    def small(self: Steady, model: Any, way: str, work: Work) -> None:
        if work.batch == 3 and way == "replay":
            raise ReplayError("slots: 3 sequences do not fit into the 2 free bytes of cuda")
        if work.batch > 3 and way == "conventional":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to")
        init(self, model, way, work)  # type: ignore[arg-type]

    monkeypatch.setattr(Steady, "__init__", small)
    done, rows = bench(kind, "--config", config, "--batch", "2", "--batch", "3", "--batch", "4")
    assert done.exit_code == 0, done.output
    assert [row["batch"] for row in rows] == [2, 3, 4]
    assert "problems" not in rows[0]
    assert rows[1]["problems"] == {"replay": "slots: 3 sequences do not fit into the 2 free bytes of cuda"}
    assert rows[1]["ms"] is None
    assert rows[1]["ms_conventional"] > 0
    assert rows[2]["problems"] == dict.fromkeys(ways, "does not fit: CUDA out of memory.")
    assert rows[2]["ms"] > 0
    assert rows[2]["ms_conventional"] is None
    assert not {"ratio", "concurrency"} & {*rows[1], *rows[2]}
    assert "batch 3, context 8, fp32, replay: slots: 3 sequences do not fit into" in done.stdout
    assert "batch 4, context 8, fp32, conventional: does not fit: CUDA out of memory." in done.stdout


def test_a_case_that_fails_leaves_the_others(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Any, work: Work) -> float:
        if work.batch == 1:
            raise RuntimeError("no such kernel")
        return 1.5

    monkeypatch.setattr(module, "engine_ms", failing)
    done, rows = bench("step", "--engine", "--config", config, "--batch", "1", "--batch", "2")
    assert done.exit_code == 0, done.output
    assert [row["ms_engine"] for row in rows] == [None, 1.5]
    assert rows[0]["problems"] == {"engine": "RuntimeError: no such kernel"}
    assert all(row["ms"] > 0 for row in rows)
    monkeypatch.setattr(Steady, "times", lambda *_: 1 / 0)
    done, rows = bench("step", "--config", config, "--batch", "1")
    assert done.exit_code == 2
    assert set(rows[0]["problems"]) == {"replay", "conventional"}
    assert "no case could be measured" in done.output
    done, rows = bench("step", "--config", config, "--seconds", "0")
    assert done.exit_code == 2
    assert "out of time before" in done.output
    assert rows == []


def test_a_model_that_cannot_be_built_leaves_the_others(config: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"model_type": "of-next-year"}))
    done, rows = bench("step", "--config", str(other), "--config", config, "--batch", "1")
    assert done.exit_code == 0, done.output
    assert [row["model"] for row in rows] == [config]
    assert "has no model type 'of-next-year'" in done.output


def test_wrong_words_are_one_line(config: str) -> None:
    app = build_app()
    for options, message in (
        (["spec", "--draft", "4", "--accepted", "9"], "accepted"),
        (["step", "--config", "gpt-2"], "config: no 'gpt-2'"),
        (["step", "--precision", "fp7"], "precision"),
    ):
        done = CliRunner().invoke(app, ["bench", *options, "--device", "cpu"])
        assert done.exit_code == 2
        assert message in done.output
