"""`replayssm bench kernel`: what it measures, writes, reads again, and draws."""

import json

import pytest
import torch

from replayssm.bench.page import BEGIN, END

SHAPE = "gdn-2x16x16g1"
TINY = ("--device", "cpu", "--shape", SHAPE, "--window", "4", "--megabytes", "1")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.fixture
def measured(cli, tmp_path):
    """A file of two cases' rows, and what the command said."""
    path = tmp_path / "rows.jsonl"
    result = cli("bench", "kernel", *TINY, "--batch", "64", "--batch", "128", "--out", str(path), "--commit", "abc")
    assert result.exit_code == 0, result.output
    return path, result


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_table(measured):
    path, result = measured
    ceiling, *rows = read(path)
    assert ceiling["read_tb_s"] > 0
    assert [(row["shape"], row["batch"], row["window"], row["commit"]) for row in rows] == [
        (SHAPE, 64, 4, "abc"),
        (SHAPE, 128, 4, "abc"),
    ]
    for row in rows:
        assert row["torch"] == torch.__version__
        assert row["ratio"] == pytest.approx(row["ms_conventional"] / row["ms"])
        assert row["error"] < 1e-6
        assert f"{SHAPE}/b{row['batch']}/t1/w4/fp32: {row['ms']:.4f} ms" in result.stderr
        assert f"b{row['batch']} t1 w4" in result.stdout
        assert f"{row['ms']:.4f}" in result.stdout


def test_rows_are_read_again_chosen_drawn_and_put_on_a_page(cli, measured, tmp_path):
    path, _ = measured
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    newer = tmp_path / "newer.jsonl"
    newer.write_text(json.dumps({**read(path)[2], "ms": 5.0}) + "\n")
    files = ("--from", str(path), "--from", str(newer))
    result = cli("bench", "kernel", *files, "--batch", "128", "--plots", str(tmp_path), "--page", str(page), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"rows": [{**read(path)[2], "ms": 5.0}]}
    assert page.read_text().count(f"| {SHAPE} | ") == 1
    assert page.read_text().count("](kernel-") == 3
    drawn = sorted(tmp_path.glob("*.png"))
    assert [file.name for file in drawn] == ["kernel-cycle.png", "kernel-roofline.png", "kernel-speedup.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)
    result = cli("bench", "kernel", *files, "--batch", "7")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--from: no figure of the cases asked for" in result.stderr


def test_the_list_of_cases(cli):
    result = cli("bench", "kernel", "--device", "cpu", "--list", "--recurrence", "kda")
    assert result.stdout.split() == ["kda-64x128x128/b16/t1/w16/fp32", "kda-64x128x128/b1/t1/w16/fp32"]


def test_no_time(cli, tmp_path):
    result = cli("bench", "kernel", *TINY, "--seconds", "0", "--out", str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 2
    assert f"out of time before {SHAPE}/b16/t1/w4/fp32" in result.stderr
    assert "no case could be measured" in result.stderr
    assert [set(row) >= {"read_tb_s", "gpu", "date"} for row in read(tmp_path / "rows.jsonl")] == [True]


def test_peers_need_a_gpu(cli):
    result = cli("bench", "kernel", *TINY, "--batch", "64", "--peers")
    assert result.exit_code == 0, result.output
    assert "FlashInfer selective_state_update: needs a CUDA device" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device tpu: expected cuda or cpu"),
        (("--device", "cuda"), "--device cuda: torch sees no CUDA device"),
        (("--device", "cpu", "--shape", "gdn-8x64"), "shape: got 'gdn-8x64'"),
        (("--device", "cpu", "--case", "b99"), "no case is left"),
        (("--from", "nowhere.jsonl"), "no such file: nowhere.jsonl"),
    ],
)
def test_errors(cli, arguments, message):
    result = cli("bench", "kernel", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
