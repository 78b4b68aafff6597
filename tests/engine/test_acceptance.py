"""``benchmarks/acceptance.py``: a row for every drafter, with what it takes to measure it again."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import acceptance

SMALL = ["--texts", "1", "--prompt", "12", "--new", "3", "--slots", "2", "--temperatures", "0", "--repeat", "1"]


@pytest.fixture
def rows(monkeypatch, tmp_path):
    def run(*words):
        out = tmp_path / "rows.jsonl"
        monkeypatch.setattr(sys, "argv", ["acceptance.py", *words, "--out", str(out)])
        acceptance.main()
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return run


def test_every_drafter(rows):
    found = {row["drafter"]: row for row in rows(*SMALL)}
    kinds = ("none", "n-gram", "n-gram, 3 branches", "suffix", "mtp, up to 1", "mtp, always 3", "mtp, tree 2-2-1",
             "draft model: docs_mamba2", "draft model: docs_mamba2, tree 2-1", "draft model: itself")  # fmt: skip
    assert set(kinds) <= set(found)
    for row in found.values():
        assert {"gpu", "date", "commit", "torch", "transformers", "replayssm"} <= set(row)
        assert row["command"] == f"python benchmarks/acceptance.py {' '.join(SMALL)}"
        assert (row["texts"], row["tokens"], row["slots"], row["temperature"]) == (5, 15, 2, 0.0)
        assert len(row["by_source"]) == 5
    assert found["none"]["tokens_per_step"] == found["none"]["speedup"] == 1
    # A token comes with the prompt and two with the next step: what the model itself drafts is right.
    assert (found["draft model: itself"]["tokens_per_step"], found["draft model: itself"]["accepted"]) == (1.5, 5)


def test_out_of_time(rows, capsys):
    assert rows(*SMALL, "--seconds", "0", "--only", "suffix") == []
    assert "out of time before none, 2 slots" in capsys.readouterr().out


def test_what_is_not_there_is_left_out(rows, capsys):
    found = rows(*SMALL, "--only", "suffix", "--drafts", "docs_none")
    assert [row["drafter"] for row in found] == ["none", "suffix"]
    assert "left out: no model 'docs_none'" in capsys.readouterr().out
