"""`replayssm drift` on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_model import error
from click.testing import Result

CLI = Callable[..., Result]
TEXT = "the quick brown fox jumps over the lazy dog and then runs home; {} more of it, {} in all.\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(TEXT.format(i, i * i) for i in range(60)))
    return str(path)


def test_every_policy(cli: CLI, hybrid: str, text: str, tmp_path: Path) -> None:
    rows, picture = tmp_path / "out" / "rows.jsonl", tmp_path / "drift.png"
    options = ["--tokens", "256", "--chunk", "96", "--text", text, "--device", "cpu"]
    result = cli("drift", hybrid, *options, "--out", str(rows), "--plot", str(picture), "--commit", "abc", "--json")
    assert result.exit_code == 0, result.output
    assert "256 of 256 tokens" in result.stderr
    document = json.loads(result.stdout)
    found: dict[str, dict[str, Any]] = {row["policy"]: row for row in document["rows"]}
    assert len(found) == 18
    reference = found["conventional"]
    assert set(reference["kl"]) == {0.0}
    assert reference["top1"] == 1
    assert max(found["float32"]["kl"]) < 1e-9
    assert abs(found["float32"]["perplexity"] / reference["perplexity"] - 1) < 1e-5
    for row in found.values():
        assert len(row["kl"]) == len(row["positions"]) == len(row["layers"]["0"]) == 8
        assert row["tokens"] == 256
        assert row["recurrences"] == ["GDN"]
        assert row["date"]
        assert row["commit"] == "abc"
    for form in ("fp8", "int8", "nvfp4"):
        ends = [found[prefix + form]["kl"][-1] for prefix in ("conventional+", "", "float32+")]
        assert ends[0] > ends[1] > ends[2] / 2 > 1e-12, form
        assert ends[0] > 2 * ends[2]
    assert found["conventional+fp16sr"]["kl"][-1] < found["conventional+bf16"]["kl"][-1]
    errors = [row["layers"]["2"][-1] for row in found.values()]
    assert max(errors[:2]) < min(errors[2:]) < 1e-5 < max(errors)
    formats = {line["format"]: line for line in document["comparisons"]}
    ratio = found["conventional+nvfp4"]["kl"][-1] / found["float32+nvfp4"]["kl"][-1]
    assert formats["nvfp4"]["rounded every token"] == pytest.approx(ratio)
    assert picture.stat().st_size > 10_000

    again = cli("drift", hybrid, *options, "--policies", "fp16sr,conventional+nvfp4,float32+fp8", "--json")
    for row in json.loads(again.stdout)["rows"]:
        assert row["kl"] == pytest.approx(found[row["policy"]]["kl"], rel=1e-3), "a run does not repeat"

    picture.unlink()
    shown = cli("drift", "--from", str(rows), "--plot", str(picture))
    assert shown.exit_code == 0, shown.output
    assert "conventional+nvfp4" in shown.stdout
    assert "rounded" in shown.stdout
    assert f"{formats['nvfp4']['rounded every token']:.1f}×" in shown.stdout
    assert picture.stat().st_size > 10_000


def test_errors(cli: CLI, hybrid: str, text: str, tmp_path: Path) -> None:
    message = error(cli("drift", hybrid, "--policies", "float32,fp9", "--text", text))
    assert "'fp9'" in message
    assert "float32+FORMAT" in message
    assert "nvfp4" in message
    assert "multiple of the window (16)" in error(cli("drift", hybrid, "--tokens", "100", "--text", text))
    assert "more than there is" in error(cli("drift", hybrid, "--tokens", "160000", "--text", text))
    assert "--device tpu" in error(cli("drift", hybrid, "--device", "tpu", "--text", text))
    stray = tmp_path / "rows.jsonl"
    stray.write_text('{"benchmark": "kernel"}\n')
    assert "line 1 is no row" in error(cli("drift", "--from", str(stray)))
