"""`replayssm generate --batch-file`: every prompt is answered once, as alone, whatever happens in between."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_model import TEXT, error

from replayssm import models
from replayssm.cli import batch_file
from replayssm.engine import Engine, Params, PromptLookup

PROMPTS = [TEXT[: 20 + 7 * i] for i in range(7)]
FLAGS = ("--threads", "1", "--max-new-tokens", "12", "--slots", "3", "--max-length", "256")


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def ask(cli, hybrid, tmp_path):
    """Run the command over lines; the result and what is in the output."""

    def run(lines: list[dict], *flags: str, output: str = "out.jsonl"):
        source = write(tmp_path / "prompts.jsonl", lines)
        out = tmp_path / output
        result = cli("generate", "--batch-file", str(source), "--output", str(out), "--model", hybrid, *FLAGS, *flags)
        return result, read(out) if result.exit_code != 2 and out.exists() else None

    return run


@pytest.fixture(scope="module")
def alone(hybrid):
    """What each prompt gets from an engine of one slot."""
    model, tokenizer = models.load(hybrid)
    with Engine(model, tokenizer, slots=1, max_length=256) as engine:
        return [request.text for request in engine.generate(PROMPTS, Params(max_tokens=12))]


@pytest.mark.parametrize("flags", [(), ("--speculate", "lookup:4"), ("--speculate", "suffix:3", "--window", "9")])
def test_every_prompt_gets_the_text_that_it_gets_alone(ask, alone, flags):
    result, records = ask([{"prompt": text} for text in PROMPTS], *flags, "--json")
    assert result.exit_code == 0, result.output
    assert {record["id"]: record["text"] for record in records} == dict(enumerate(alone, 1))
    assert all((record["tokens"], record["finish"]) == (12, "length") for record in records)
    summary = json.loads(result.stdout)
    assert result.stderr == ""
    counts = [summary[key] for key in ("requests", "earlier", "failed", "tokens", "slots")]
    assert counts == [7, 0, 0, 84, 3]
    assert summary["prompt_tokens"] == sum(record["prompt_tokens"] for record in records) > 50
    assert summary["tokens_per_second"] == pytest.approx(84 / summary["seconds"])
    if flags:
        assert 0 < summary["drafts"]["accepted"] <= summary["drafts"]["proposed"]
    else:
        assert summary["forwards"] >= 3 * 12


def test_an_assistant_and_the_models_own_head(ask, alone, hybrid, folders, tmp_path):
    from replayssm.engine import MtpHead

    lines = [{"prompt": text} for text in PROMPTS[:3]]
    result, records = ask(lines, "--speculate", f"assistant:{folders('attention')}:3")
    assert result.exit_code == 0, result.output
    assert {record["id"]: record["text"] for record in records} == dict(enumerate(alone[:3], 1))
    assert "has no multi-token-prediction head" in error(ask(lines, "--speculate", "mtp:2", output="m")[0])
    assert not (tmp_path / "m").exists()  # nothing was answered: no empty file stays
    folder = tmp_path / "with_head"
    folder.mkdir()
    for path in Path(hybrid).iterdir():
        (folder / path.name).symlink_to(path)
    MtpHead(models.load(folder)[0]).save(folder / "mtp.safetensors")
    result, records = ask(lines, "--speculate", "mtp:2", "--model", str(folder), "--json", output="m")
    assert result.exit_code == 0, result.output
    assert {record["id"]: record["text"] for record in records} == dict(enumerate(alone[:3], 1))
    assert json.loads(result.stdout)["drafts"]["proposed"] > 0


def test_a_line_says_how_it_is_continued(ask, hybrid):
    model, tokenizer = models.load(hybrid)
    ids = tokenizer(PROMPTS[0])["input_ids"]
    given = {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}
    lines = [
        {"id": "ids", "prompt": ids, "max_new_tokens": 4},
        {"id": "drawn", "prompt": PROMPTS[1], **given, "presence_penalty": 0.1, "frequency_penalty": 0.2, "n": 3},
        {"id": "stop", "prompt": PROMPTS[2], "stop_tokens": list(range(320)), "ignore_eos": True},
        {"id": 9, "prompt": PROMPTS[3], "stop": "e", "max_new_tokens": 40},
    ]
    result, records = ask(lines)
    assert result.exit_code == 0, result.output
    found = {record["id"]: record for record in records}
    with Engine(model, tokenizer, slots=3, max_length=256) as engine:
        drawn = Params(12, 1.2, 40, 0.9, 0.01, 1.1, 0.1, 0.2, seed=5, n=3)
        wanted = engine.generate([ids, PROMPTS[1]], [Params(4), drawn])
        assert found["ids"]["text"] == wanted[0].text
        assert [s["text"] for s in found["drawn"]["samples"]] == [s.text for s in wanted[1].samples]
    assert found["ids"]["tokens"] == 4
    assert found["drawn"]["text"] == found["drawn"]["samples"][0]["text"]
    assert "samples" not in found["ids"]
    assert (found["stop"]["tokens"], found["stop"]["finish"]) == (1, "stop")
    assert "e" not in found[9]["text"]


def test_samples_differ_and_come_again(ask):
    lines = [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[0]}]
    flags = ("--temperature", "1.5", "--top-k", "200")
    texts = [sorted((r["id"], r["text"]) for r in ask(lines, *flags, output=name)[1]) for name in ("a", "b")]
    assert texts[0] == texts[1]
    assert texts[0][0][1] != texts[0][1][1]  # each line has a seed of its own
    other = ask(lines, *flags, "--seed", "3", output="c")[1]
    assert sorted((r["id"], r["text"]) for r in other) != texts[0]


def test_what_is_there_is_not_done_again(ask, tmp_path):
    lines = [{"prompt": text, "id": f"p{i}", "temperature": 1.0} for i, text in enumerate(PROMPTS)]
    result, whole = ask(lines)
    assert result.exit_code == 0
    out = tmp_path / "out.jsonl"
    kept = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:3]) + kept[3][:25])  # cut off within a line
    result, records = ask(lines, "--slots", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["earlier"] == 3
    assert records[:3] == whole[:3]
    assert sorted(records, key=lambda r: r["id"]) == sorted(whole, key=lambda r: r["id"])
    before = out.read_bytes()
    result, _ = ask(lines)
    assert (result.exit_code, out.read_bytes()) == (0, before)
    assert "7 requests (7 of them earlier); 0 tokens" in result.stdout
    result, records = ask([*lines[::-1], {"prompt": "more", "id": "new"}])  # other orders and further lines are welcome
    assert records[:7] == [json.loads(line) for line in before.splitlines()]
    assert records[7]["id"] == "new"


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 40])
def test_any_cut_is_repaired(ask, tmp_path, cut):
    lines = [{"prompt": text} for text in PROMPTS[:2]]
    _, whole = ask(lines, "--slots", "1")
    out = tmp_path / "out.jsonl"
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:cut])
    result, records = ask(lines)
    assert (result.exit_code, records) == (0, whole)


def test_answers_to_other_questions_are_refused(ask, tmp_path, folders):
    lines = [{"prompt": text} for text in PROMPTS[:2]]
    ask(lines, "--slots", "1")
    out = tmp_path / "out.jsonl"
    before = out.read_bytes()
    for changed, flags, match in (
        ([{"prompt": "x"}, lines[1]], (), "out.jsonl:1: id 1 answers another prompt, or other options or another"),
        (lines, ("--max-new-tokens", "9"), "answers another prompt, or other options"),
        (lines, ("--precision", "bf16"), "answers another prompt, or other options"),
        (lines, ("--seed", "4"), "answers another prompt, or other options"),
        (lines, ("--model", models.DEFAULT), "answers another prompt, or other options or another model"),
        (lines[:1], (), "out.jsonl:2: id 2 is not in the batch file"),
    ):
        assert match in error(ask(changed, *flags)[0])
        assert out.read_bytes() == before
    for wrong, match in (
        (b"my notes", "out.jsonl:1: is no line of this command"),
        (b"my notes\n", "out.jsonl:1: is no line of this command"),
        (b'{"id": [1], "request": "x"}\n', "out.jsonl:1: is no line of this command"),
        (b"[]\n", "out.jsonl:1: is no line of this command"),
        (before.splitlines(keepends=True)[0] * 2, "out.jsonl:2: id 1 comes twice"),
    ):
        out.write_bytes(wrong)
        assert match in error(ask(lines)[0])
        assert out.read_bytes() == wrong


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "x", "max_tokens": 3},
            "prompts.jsonl:2: unknown field 'max_tokens'; expected prompt, id, max_new_",
        ),
        ({"id": "x"}, "prompts.jsonl:2: prompt: Field required"),
        ({"prompt": 5}, "prompts.jsonl:2: prompt: Input should be a valid string"),
        ({"prompt": "x", "temperature": "hot"}, "prompts.jsonl:2: temperature: Input should be"),
        ({"prompt": "x", "temperature": -1}, "prompts.jsonl:2: temperature: expected a finite number"),
        ({"prompt": "x", "max_new_tokens": 0}, "prompts.jsonl:2: max_tokens: expected"),
        ({"prompt": "x", "stop": [""]}, "prompts.jsonl:2: stop: an empty string"),
        ({"prompt": "x", "id": True}, "prompts.jsonl:2: id: Input should be"),
        ({"prompt": "x", "id": "first"}, "prompts.jsonl:2: id 'first' is that of line 1, too"),
        (["x"], "prompts.jsonl:2: Input should be an object"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(ask, tmp_path, line, message):
    result, records = ask([{"prompt": "x", "id": "first"}, line, {"prompt": "y"}])
    assert message in error(result)
    assert records is None
    assert not (tmp_path / "out.jsonl").exists()


def test_more_user_errors(cli, ask, hybrid, tmp_path):
    source = write(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    base = ("generate", "--model", hybrid)
    batch = (*base, "--batch-file", str(source))
    out = ("--output", str(tmp_path / "out"))
    assert "--batch-file needs --output" in error(cli(*batch))
    assert "--output is the batch file itself" in error(cli(*batch, "--output", str(source)))
    assert "--batch-file takes no prompt" in error(cli(*batch, *out, "text"))
    assert "--output goes with --batch-file" in error(cli(*base, *out, "text"))
    assert "--memory-gb goes with --batch-file" in error(cli(*base, "--memory-gb", "1", "text"))
    assert "slots: give slots or memory, not both" in error(cli(*batch, *out, "--memory-gb", "1", "--slots", "2"))
    assert "memory: one sequence takes" in error(cli(*batch, *out, "--memory-gb", "0.00001"))
    assert "is a folder" in error(cli(*batch, "--output", str(tmp_path)))
    assert "no such file" in error(cli(*base, "--batch-file", str(tmp_path / "none"), *out))
    source.write_text("{\n")
    assert "prompts.jsonl:1: Invalid JSON" in error(cli(*batch, *out))
    source.write_text("\n\n")
    assert "holds no prompts" in error(cli(*batch, *out))
    assert not (tmp_path / "out").exists()


def test_errors_of_single_requests_are_counted(ask):
    lines = [{"prompt": PROMPTS[0]}, {"prompt": "", "id": "none"}, {"prompt": [99999], "id": "id"}]
    lines += [{"prompt": PROMPTS[1], "max_new_tokens": 300, "id": "long"}, {"prompt": PROMPTS[2]}]
    result, records = ask(lines)
    assert result.exit_code == 1
    assert "5 requests, 3 failed; 24 tokens" in result.stdout
    for message in ("id 'none': prompt: expected at least one token", "id 'id': prompt: expected token ids 0…319"):
        assert message in result.stderr
    wrong = {record["id"]: record for record in records if "error" in record}
    assert wrong.keys() == {"none", "id", "long"}
    assert all((r["finish"], r["text"], r["tokens"]) == ("error", "", 0) for r in wrong.values())
    assert "do not fit into max_length=256" in wrong["long"]["error"]
    result, again = ask(lines, "--json")
    assert (result.exit_code, json.loads(result.stdout)["failed"], again) == (1, 3, records)


def test_a_model_that_raises_fails_what_runs_and_goes_on(hybrid, tmp_path, monkeypatch):
    model, tokenizer = models.load(hybrid)
    source = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    jobs = batch_file.read_jobs(source, Params(max_tokens=4), {})
    results = batch_file.Results(tmp_path / "out", jobs)
    ticks = []
    with Engine(model, tokenizer, slots=2, max_length=256, drafter=PromptLookup()) as engine:
        whole, calls = engine.runner.commit, []

        def commit(*arguments):
            calls.append(1)
            if len(calls) == 6:
                raise RuntimeError("out of luck")
            return whole(*arguments)

        monkeypatch.setattr(engine.runner, "commit", commit)
        tally = batch_file.run(engine, jobs, results, lambda tally: ticks.append(tally.done))
    results.close()
    records = read(tmp_path / "out")
    assert [r["error"] for r in records if "error" in r] == ["RuntimeError: out of luck"] * 2
    assert (tally.done, tally.failed, len(records)) == (7, 2, 7)
    assert ticks == sorted(ticks)

    # one that fails before any request runs cannot go on
    results = batch_file.Results(tmp_path / "other", jobs)
    with Engine(model, tokenizer, slots=2, max_length=256) as engine:

        def refuse():
            raise RuntimeError("no luck at all")

        monkeypatch.setattr(engine.scheduler, "admit", refuse)
        with pytest.raises(RuntimeError, match="no luck at all"):
            batch_file.run(engine, jobs, results)
    results.close()


def test_two_runs_do_not_write_one_file(hybrid, tmp_path):
    jobs = batch_file.read_jobs(write(tmp_path / "p", [{"prompt": "x"}]), Params(), {})
    first = batch_file.Results(tmp_path / "out", jobs)
    with pytest.raises(batch_file.UserError, match="another run is writing it"):
        batch_file.Results(tmp_path / "out", jobs)
    first.append({"id": 1, "request": jobs[0].digest, "text": "é"})
    first.close()
    second = batch_file.Results(tmp_path / "out", jobs)
    assert second.done == {1: None}
    second.close()


def test_killed_midway_and_resumed(ask, hybrid, tmp_path):
    """Killed after some answers; the next run adds the others, and all are those of a run that nothing interrupted."""
    lines = [{"prompt": PROMPTS[i % 7], "id": i, "temperature": 1.0, "max_new_tokens": 30} for i in range(24)]
    _, whole = ask(lines, output="whole")
    source, out = write(tmp_path / "prompts.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "replayssm.cli.main", "generate", "--model", hybrid, *FLAGS]
    process = subprocess.Popen([*command, "--batch-file", str(source), "--output", str(out)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if out.exists() and out.read_bytes().count(b"\n") >= 4:
            process.kill()
            break
        time.sleep(0.002)
    process.communicate(timeout=60)
    there = out.read_bytes().count(b"\n")
    assert 4 <= there < 24
    result, records = ask(lines, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["earlier"] == there
    assert sorted(records, key=lambda r: r["id"]) == sorted(whole, key=lambda r: r["id"])


def test_an_interrupt_leaves_no_errors_behind(ask, monkeypatch):
    lines = [{"prompt": text} for text in PROMPTS]
    step, calls = Engine.step, []

    def interrupted(engine):
        calls.append(1)
        if len(calls) == 15:
            engine.runner.commit = lambda *arguments: signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result, records = ask(lines)
    assert result.exit_code == 130
    assert result.stderr.startswith("interrupted: ")
    assert result.stderr.count("\n") == 1
    assert 0 < len(records) < 7
    assert all("error" not in record for record in records)
    monkeypatch.undo()
    result, records = ask(lines)
    assert (result.exit_code, len(records)) == (0, 7)


def test_a_bar_on_a_terminal_only(monkeypatch, tmp_path, capsys):
    jobs = batch_file.read_jobs(write(tmp_path / "p", [{"prompt": "x"}, {"prompt": "y"}]), Params(), {})
    results = batch_file.Results(tmp_path / "out", jobs)
    for terminal in (False, True):
        monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
        with batch_file.progress(jobs, results) as tick:
            tick(batch_file.Tally(done=2, failed=1, tokens=5))
        shown = capsys.readouterr()
        assert shown.out == ""
        assert ("2/2" in shown.err and "1 failed" in shown.err) == terminal
        assert terminal or shown.err == ""
    results.close()
    assert not (tmp_path / "out").exists()
