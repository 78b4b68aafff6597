"""`replayssm tune` with a stopwatch that is a formula: what it searches, writes, and what the library then reads."""

import importlib
import json

import pytest
import torch

from replayssm.bench.cases import make_case

launch = pytest.importorskip("replayssm.backends.triton.launch", reason="needs triton")
GPU = "NVIDIA Test 9"


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU that has no table; timing is a formula that likes few warps and many programs."""

    def measure(case, setup, tiles):
        tile = list(tiles.values())[-1]
        time = tile.warps + 1 / tile.programs + case.draft / 1000
        return {"ms_step": time, "ms": time}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    monkeypatch.setattr(importlib.import_module("replayssm.cli.tune"), "measure_replay", measure)
    monkeypatch.delenv("REPLAYSSM_TILES", raising=False)
    launch.tile_table.cache_clear()
    yield
    launch.tile_table.cache_clear()


def tune(cli, *arguments):
    return cli("tune", "--workers", "0", *arguments)


def test_what_it_finds_is_what_the_library_takes(cli, gpu, monkeypatch, tmp_path):
    out, rows = tmp_path / "tables", tmp_path / "rows.jsonl"
    result = tune(cli, "--shape", "gdn-8x64x64g4", "--out", str(out), "--rows", str(rows), "--rounds", "9")
    assert result.exit_code == 0, result.output
    assert f"REPLAYSSM_TILES={out}" in result.stderr
    written = json.loads((out / "nvidia_test_9.json").read_text())
    assert written["gpu"] == GPU
    assert list(written["tiles"]) == [f"{kernel}/head/delta/64x64/float32" for kernel in ("decode", "fold", "verify")]
    monkeypatch.setenv("REPLAYSSM_TILES", str(out))
    launch.tile_table.cache_clear()
    for draft, kernel in ((1, "step"), (1, "fold"), (4, "step")):
        tile = launch.choose_tile(kernel, make_case("gdn-8x64x64g4", 256, draft).layout, torch.device("cuda"))
        assert (tile.warps, tile.programs) == (1, 64)
    kinds = {(row["sweep"], row["draft"], row["gpu"]) for row in map(json.loads, rows.read_text().splitlines())}
    assert kinds == {("step", 1, GPU), ("fold", 1, GPU), ("step", 4, GPU)}


def test_entries_of_other_layouts_stay(cli, gpu, monkeypatch, tmp_path):
    (tmp_path / "nvidia_test_9.json").write_text('{"tiles": {"decode/none/add/16x16/float32": [16, 16, 1]}}')
    monkeypatch.setenv("REPLAYSSM_TILES", str(tmp_path))
    result = tune(cli, "--shape", "mamba2-4x32x16g2", "--draft", "1", "--rounds", "0", "--json")
    found = json.loads(result.stdout)
    assert found["gpu"] == GPU
    assert set(found["tiles"]) == {"decode/head/add/32x16/float32", "fold/head/add/32x16/float32"}
    written = json.loads((tmp_path / "nvidia_test_9.json").read_text())["tiles"]
    assert written == found["tiles"] | {"decode/none/add/16x16/float32": [16, 16, 1]}


def test_shapes_that_share_a_name_are_searched_once(cli, gpu, tmp_path):
    result = tune(cli, "--recurrence", "kda", "--draft", "1", "--rounds", "0", "--out", str(tmp_path))
    assert result.stderr.count("decode/channel/delta/128x128/float32") == 1
    assert "kda-32x128x128/b256/t1/w16/fp32: " not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "x"), "tune: needs a CUDA device; the CPU kernels have no tiles"),
        (("--out", "x", "--rounds", "-1"), "Invalid value for '--rounds'"),
    ],
)
def test_without_a_gpu(cli, arguments, message):
    result = cli("tune", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_errors_with_a_gpu(cli, gpu, monkeypatch, tmp_path):
    result = tune(cli)
    assert result.exit_code == 2
    assert "say where the table goes: --out FOLDER, or REPLAYSSM_TILES=FOLDER" in result.stderr
    result = tune(cli, "--out", str(tmp_path), "--shape", "gdn-8x64")
    assert result.exit_code == 2
    assert "shape: got 'gdn-8x64', expected one of mamba2-128x64x128" in result.stderr
