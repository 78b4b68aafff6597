"""`replayssm generate`: the text is stock's, drafts change nothing, and what goes wrong is said in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_model import TEXT, error

from replayssm import models
from replayssm.cli.generate import Printer

FLAGS = ("--max-new-tokens", "24", "--threads", "1")


@pytest.fixture(scope="module")
def stock(hybrid):
    """The tokens and the text that transformers alone generates from TEXT."""
    model, tokenizer = models.load(hybrid)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    return ids.shape[1], tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("speculate", ["off", "lookup:5", "lookup"])
def test_the_text_is_that_of_stock(cli, hybrid, stock, speculate):
    result = cli("generate", TEXT, "--model", hybrid, "--speculate", speculate, *FLAGS, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["stats"]["prompt_tokens"], document["text"]) == stock


def test_streams_the_text_and_nothing_else(cli, hybrid, stock):
    result = cli("generate", TEXT, "--model", hybrid, *FLAGS)
    assert (result.exit_code, result.stdout, result.stderr) == (0, stock[1] + "\n", "")


@pytest.mark.parametrize("speculate", ["suffix:5", "mtp:2"])
def test_drafts_that_only_an_engine_knows(cli, hybrid, stock, tmp_path, speculate):
    """Another way to the same text, and to the same counts."""
    from replayssm.engine import MtpHead

    for path in Path(hybrid).iterdir():
        (tmp_path / path.name).symlink_to(path)
    torch.manual_seed(1)
    MtpHead(models.load(tmp_path)[0]).save(tmp_path / "mtp.safetensors")
    result = cli("generate", TEXT, "--model", str(tmp_path), "--speculate", speculate, *FLAGS, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    stats, drafts = document["stats"], document["stats"]["drafts"]
    assert (stats["prompt_tokens"], document["text"], document["speculate"]) == (*stock, speculate)
    assert stats["model_steps"] + drafts["accepted"] == 24
    assert drafts["proposed"] > 0 or speculate == "suffix:5"  # nothing comes twice in this text
    plain = json.loads(cli("generate", TEXT, "--model", hybrid, *FLAGS, "--json").stdout)["stats"]
    for key in ("tokens", "prompt_tokens"):
        assert stats[key] == plain[key]
    for key in ("conventional_read", "conventional_written"):
        assert stats["state_bytes"][key] == plain["state_bytes"][key]
    assert stats["sequence_bytes"]["checkpoint"] == plain["sequence_bytes"]["checkpoint"]
    assert stats["folds"] >= 1
    if not drafts["accepted"]:
        assert stats["state_bytes"]["written"] > plain["state_bytes"]["written"]
    assert stats["sequence_bytes"]["convolution"] >= plain["sequence_bytes"]["convolution"] > 0
    result = cli("generate", TEXT, "--model", str(tmp_path), "--speculate", speculate, *FLAGS, "--stats")
    assert result.stdout.startswith(stock[1])
    assert "drafts accepted" in result.stdout


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_an_assistant_changes_nothing(cli, folders, hybrid, stock, kind):
    spec = f"assistant:{folders(kind)}:3"
    result = cli("generate", TEXT, "--model", hybrid, "--speculate", spec, *FLAGS, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["text"] == stock[1]
    drafts = document["stats"]["drafts"]
    assert document["stats"]["model_steps"] + drafts["accepted"] == 24
    if kind == "hybrid":  # the same model drafts: every draft is right
        assert drafts["accepted"] == drafts["proposed"] >= 15
        assert document["stats"]["model_steps"] == 6


def test_json_document(cli, hybrid):
    result = cli(
        "generate", TEXT, "--model", hybrid, "--speculate", "lookup:4", *FLAGS, "--precision", "fp32+bf16", "--json"
    )
    document = json.loads(result.stdout)
    stats = document.pop("stats")
    assert document.keys() == {
        *("model", "prompt", "text", "seed", "max_new_tokens", "speculate", "window", "precision", "dtype"),
        *("temperature", "top_p", "top_k"),
    }
    assert (document["prompt"], document["speculate"], document["window"]) == (TEXT, "lookup:4", 20)
    assert stats.keys() == {
        *("prompt_tokens", "tokens", "seconds", "prompt_seconds", "tokens_per_second", "model_steps", "folds"),
        *("drafts", "state_bytes", "sequence_bytes"),
    }
    state = 3 * 4 * 16 * 16  # layers, heads, head_dim, state_dim
    assert stats["tokens"] == 24
    assert stats["sequence_bytes"]["checkpoint"] == state * 4
    assert stats["sequence_bytes"]["read_copy"] == state * 2
    assert stats["state_bytes"]["conventional_written"] == stats["state_bytes"]["conventional_read"] == 23 * state * 4
    assert stats["folds"] >= 1


def test_presets_of_precision(cli, hybrid):
    """Scales count as what they belong to; a full-precision checkpoint under a close copy says what stock says."""
    sizes = {}
    for preset in ("float32+int8", "nvfp4", "fp16sr+fp8"):
        result = cli("generate", TEXT, "--model", hybrid, *FLAGS, "--precision", preset, "--json")
        found = json.loads(result.stdout)["stats"]["sequence_bytes"]
        sizes[preset] = (found["checkpoint"], found["read_copy"])
    rows = 3 * 4 * 16  # layers, heads, head_dim, each of 16 elements
    assert sizes["float32+int8"] == (rows * 64, rows * (16 + 4))
    assert sizes["nvfp4"] == (rows * (16 + 2) + 3 * 4 * 4, 0)  # padded to 32 elements
    assert sizes["fp16sr+fp8"] == (rows * 32, rows * 20)


def test_stats_end_with_a_table(cli, hybrid, stock):
    result = cli("generate", TEXT, "--model", hybrid, "--speculate", "lookup:4", *FLAGS, "--stats")
    text, _, table = result.stdout.partition("┏")
    assert text.strip() == stock[1].strip()
    for word in (
        "tokens/s",
        "model steps",
        "drafts accepted",
        "folds",
        "state and buffer read",
        "memory of the sequence",
    ):
        assert word in table


def test_a_seed_makes_sampling_reproducible(cli, hybrid):
    def sample(*flags):
        result = cli("generate", TEXT, "--model", hybrid, *FLAGS, "--temperature", "1.5", "--json", *flags)
        document = json.loads(result.stdout)
        return document["text"], document["seed"]

    first = sample("--seed", "7")
    assert first[1] == 7
    assert sample("--seed", "7") == first
    assert sample("--seed", "8")[0] != first[0]
    drafted = sample("--seed", "7", "--speculate", "lookup:4")
    assert sample("--seed", "7", "--speculate", "lookup:4") == drafted
    text, seed = sample("--top-k", "50", "--top-p", "0.95")  # a new seed, which the document names
    assert sample("--top-k", "50", "--top-p", "0.95", "--seed", str(seed))[0] == text


def test_the_prompt_may_come_from_a_file_or_stdin(cli, hybrid, stock, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert cli("generate", "--file", str(file), "--model", hybrid, *FLAGS).stdout == stock[1] + "\n"
    assert cli("generate", "--model", hybrid, *FLAGS, stdin=TEXT).stdout == stock[1] + "\n"


def test_without_a_prompt_a_built_in_one_is_continued_and_said_so(cli, hybrid):
    result = cli("generate", "--model", hybrid, "--max-new-tokens", "2", "--threads", "1")
    assert result.exit_code == 0
    assert result.stderr.startswith("No prompt given; continuing this one:")
    assert "This is the main iterator trait." in result.stderr
    result = cli("generate", "--model", hybrid, "--max-new-tokens", "2", "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout)["prompt"].startswith("# Trait std::iter::Iterator")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--model", "docs_gnd"], "no model 'docs_gnd'"),
        (["x", "--speculate", "lookup:zero"], "--speculate lookup:zero: expected 1…256 drafts, got 'zero'"),
        (["x", "--speculate", "lookup:0"], "expected 1…256 drafts, got '0'"),
        (["x", "--speculate", "lookup:257"], "expected 1…256 drafts"),
        (["x", "--speculate", "assistant:docs_gdn:-1"], "expected 1…256 drafts, got '-1'"),
        (["x", "--speculate", "magic"], "--speculate magic: expected lookup:8, suffix:8, mtp:3, assistant:PATH:4"),
        (["x", "--speculate", "assistant"], "expected lookup:8, suffix:8, mtp:3, assistant:PATH:4 or off"),
        (["x", "--precision", "fp7"], "precision: got 'fp7', expected a checkpoint"),
        (["x", "--dtype", "int3"], "--dtype int3: expected one of fp32, bf16, fp16, auto"),
        (["x", "--top-p", "0.9"], "--temperature above 0"),
        (["  "], "the prompt is empty"),
        (["caf\udce9"], "the prompt: not UTF-8 text (byte 0xe9 at 3)"),
        (["x", "--file", "y"], "give a prompt or --file, not both"),
        (["--file", "/nowhere/prompt.txt"], "no such file: /nowhere/prompt.txt"),
        (["--file", "/"], "/: is a folder"),
    ],
)
def test_user_errors_are_one_line(cli, arguments, message):
    assert message in error(cli("generate", *arguments))


def test_more_user_errors(cli, hybrid, folders, tmp_path):
    assert "cannot replay RwkvSelfAttention (RWKV)" in error(cli("generate", "x", "--model", folders("rwkv")))
    assert "has no recurrent layers" in error(cli("generate", "x", "--model", folders("attention")))
    assert "do not fit into window=3" in error(
        cli("generate", "x", "--model", hybrid, "--speculate", "lookup:8", "--window", "3")
    )
    assert "no config.json" in error(cli("generate", "x", "--model", str(tmp_path)))
    assert "stdin: not UTF-8 text (byte 0xff at 2)" in error(cli("generate", stdin=b"ab\xff"))
    file = tmp_path / "latin"
    file.write_bytes(b"caf\xe9")
    assert f"{file}: not UTF-8 text (byte 0xe9 at 3)" in error(cli("generate", "--file", str(file)))
    file.write_text("")
    assert "the prompt is empty" in error(cli("generate", "--file", str(file)))


def test_printer_holds_back_what_may_still_change(hybrid):
    _, tokenizer = models.load(hybrid)
    text = "a — b ☃☃ c 🦀 naïve"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) > len(text)  # characters span tokens
    pieces: list[str] = []
    printer = Printer(tokenizer, pieces.append)
    printer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for start in range(0, len(tokens), 2):
        printer.put(torch.tensor([tokens[start : start + 2]]))
    printer.end()
    assert "".join(pieces) == printer.text == text
    assert "\ufffd" not in printer.text
    assert len(pieces) > 5

    pieces.clear()
    printer = Printer(tokenizer, pieces.append)
    printer.put(torch.tensor([[0]]))
    printer.put(torch.tensor(tokenizer("☃")["input_ids"][:-1]))
    assert pieces == []  # a part of a character
    printer.end()
    assert pieces == ["\ufffd"]


def test_the_demo(cli):
    """What `make demo` runs, on the model in the box: words, and drafts that are accepted."""
    demo = ("generate", "--speculate", "lookup:8", "--max-new-tokens", "200")
    document = json.loads(cli(*demo, "--json").stdout)
    stats = document["stats"]
    assert document["model"] == models.DEFAULT
    assert document["text"].isprintable() or "\n" in document["text"]
    assert "\ufffd" not in document["text"]
    assert len(set(document["text"].split())) > 20
    assert stats["tokens"] == 200
    assert stats["drafts"]["accepted"] >= 20
    assert stats["model_steps"] == 200 - stats["drafts"]["accepted"]
    moved = stats["state_bytes"]
    assert moved["read"] + moved["written"] < 0.75 * (moved["conventional_read"] + moved["conventional_written"])


def test_as_a_process(hybrid, stock):
    command = [sys.executable, "-W", "error", "-m", "replayssm.cli.main", "generate", "--model", hybrid, *FLAGS]
    done = subprocess.run(command, input=TEXT.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, stock[1] + "\n", b"")
