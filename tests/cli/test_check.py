"""`replayssm check`: passes where replay equals stock, fails where it does not, and says where."""

import json

import pytest
import torch
from cli_model import TEXT, error

from replayssm import ReplayCache, models
from replayssm.cli.check import Run, compare
from replayssm.integrations.transformers import pool

FLAGS = ("--max-new-tokens", "20", "--draft", "3", "--window", "8")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{TEXT}\n\nthe\n", encoding="utf-8")
    return str(file)


def test_a_right_model_passes(cli, hybrid, prompts):
    result = cli("check", hybrid, "--prompts", prompts, *FLAGS, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document.keys() == {"model", "dtype", "passed", "prompts", "layers"}
    assert document["passed"] is True
    assert [(row["prompt"], row["mode"]) for row in document["prompts"]] == [
        *((TEXT, "greedy"), (TEXT, "lookup:3")),
        *(("the", "greedy"), ("the", "lookup:3")),
    ]
    for row in document["prompts"]:
        assert row["tokens"] == 20
        assert row["tokens_equal"]
        assert row["first_difference"] is row["margin"] is None
        assert row["max_logit_difference"] < 1e-5 * row["max_logit"]
    assert [(row["layer"], row["recurrence"]) for row in document["layers"]] == [(0, "GDN"), (1, "GDN"), (2, "GDN")]
    for row in document["layers"]:
        assert row["folds"] == 2
        assert 0 < row["state_error"] < 1e-6


def test_the_model_in_the_box_on_held_out_text(cli):
    result = cli("check", "--max-new-tokens", "12", "--window", "8", "--draft", "3", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["model"] == "docs_gdn"
    assert len(document["prompts"]) == 2 * len(models.heldout_sources()) == 10
    assert len(document["layers"]) == 6


def test_in_words(cli, hybrid, prompts):
    result = cli("check", hybrid, "--prompts", prompts, *FLAGS)
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith("PASS: 4 of 4 runs equal stock")
    assert "FAIL" not in result.stdout


def test_bfloat16_is_compared_with_its_own_rounding(cli, hybrid, prompts):
    result = cli("check", hybrid, "--prompts", prompts, *FLAGS, "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["dtype"] == "bf16"
    assert all(row["max_logit_difference"] < 5e-2 * row["max_logit"] for row in document["prompts"])


def test_wrong_outputs_fail(cli, hybrid, prompts, monkeypatch):
    step = pool.step
    monkeypatch.setattr(pool, "step", lambda *args: step(*args) * 1.05)
    result = cli("check", hybrid, "--prompts", prompts, *FLAGS, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["passed"] is False
    assert not any(row["passed"] for row in document["prompts"])
    result = cli("check", hybrid, "--prompts", prompts, *FLAGS)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "FAIL: 0 of 4 runs equal stock"


def test_wrong_states_fail(cli, hybrid, prompts, monkeypatch):
    materialise = ReplayCache.materialise
    monkeypatch.setattr(ReplayCache, "materialise", lambda *args: materialise(*args) * 1.01)
    result = cli("check", hybrid, "--prompts", prompts, *FLAGS, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert not any(row["passed"] for row in document["layers"])
    assert all(row["state_error"] > 1e-4 for row in document["layers"])


def test_the_model_is_stock_again_afterwards(hybrid, cli, prompts, monkeypatch):
    loaded = models.load(hybrid)
    monkeypatch.setattr(models, "load", lambda *_, **__: loaded)
    for _ in range(2):  # a second attach would refuse
        assert cli("check", hybrid, "--prompts", prompts, *FLAGS).exit_code == 0


def run(tokens, best=2.0, second=1.0):
    logits = torch.zeros(len(tokens), 8)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = best
    logits[:, 7] = second
    return Run(torch.tensor(tokens), logits)


def test_compare():
    same = compare(run([1, 2, 3]), run([1, 2, 3]))
    assert same["passed"]
    assert same["tokens_equal"]
    assert (same["max_logit_difference"], same["max_logit"]) == (0.0, 2.0)

    other = compare(run([1, 2, 3]), run([1, 7, 3]))
    assert (other["first_difference"], other["margin"], other["tie"], other["passed"]) == (1, 1.0, False, False)

    early = compare(run([1, 2, 3]), run([1, 2]))
    assert (early["first_difference"], early["tie"], early["passed"]) == (2, False, False)

    tied = Run(torch.tensor([1]), torch.tensor([[0.0, 1.0, 0.99995]]))
    tie = compare(tied, Run(torch.tensor([2]), torch.tensor([[0.0, 0.99996, 0.99998]])))
    assert (tie["first_difference"], tie["tie"], tie["passed"]) == (0, True, True)

    # What follows the first difference has another past: it is not compared.
    beyond = Run(torch.tensor([2, 3]), torch.tensor([[0.0, 0.99996, 0.99998, 0.0], [9.0, 9.0, 9.0, 9.0]]))
    assert compare(Run(torch.tensor([1, 3]), torch.tensor([[0.0, 1.0, 0.99995, 0.0], [0, 0, 0, 1]])), beyond)["passed"]

    assert not compare(run([1]), run([1], best=2.001))["passed"]
    assert compare(run([1]), run([1], best=2.001), torch.bfloat16)["passed"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "holds no prompt"),
        (b"\xff", "not UTF-8 text (byte 0xff at 0)"),
        (b'{"a": 1}', "expected a list of strings"),
        (b"[", "not JSON"),
    ],
)
def test_prompt_files(cli, hybrid, tmp_path, content, message):
    file = tmp_path / ("prompts.json" if content[:1] in b"{[" else "prompts.txt")
    file.write_bytes(content)
    assert message in error(cli("check", hybrid, "--prompts", str(file)))


def test_user_errors(cli, hybrid, folders, prompts, tmp_path):
    assert "no model 'nothing'" in error(cli("check", "nothing", "--prompts", prompts))
    assert "no such file: " in error(cli("check", hybrid, "--prompts", str(tmp_path / "missing.txt")))
    assert "RWKV" in error(cli("check", folders("rwkv"), "--prompts", prompts))
    assert "do not fit into window=2" in error(cli("check", hybrid, "--prompts", prompts, "--window", "2"))
