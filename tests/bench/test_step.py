"""Whole steps of small models on the CPU: rows, schedules, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm import ReplayError
from replayssm.bench.models import MODELS, build, raw_config
from replayssm.bench.steady import Steady, Work, by_cycle
from replayssm.bench.step import Bench
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


def test_a_case_that_fails_leaves_the_others(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Bench.decode

    def failing(self: Bench, work: Work, *rest: Any) -> Any:
        if work.batch == 1:
            raise RuntimeError("no such kernel")
        return decode(self, work, *rest)

    monkeypatch.setattr(Bench, "decode", failing)
    out = tmp_path / "rows.jsonl"
    options = ["--context", "8", "--cycles", "1", "--window", "6", "--device", "cpu", "--config", config]
    both = ["--batch", "1", "--batch", "2", "--out", str(out)]
    done = CliRunner().invoke(build_app(), ["bench", "step", *options, *both], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "batch 1, context 8, fp32: RuntimeError no such kernel" in done.output
    assert [json.loads(line)["batch"] for line in out.read_text().splitlines()] == [2]
    done = CliRunner().invoke(build_app(), ["bench", "step", *options, "--seconds", "0"], catch_exceptions=False)
    assert done.exit_code == 2
    assert "out of time before" in done.output


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
