"""The examples in README.md and docs/ run.

A fenced block is run if the line before it is a comment `<!-- run -->` (invisible wherever Markdown is shown):

- `python`: the marked blocks of a file run in order in one namespace, so a page may build on what it said before.
- `console`: each line `$ replayssm …` is a command. `<!-- run exit=2 -->` expects that exit code of the last one.
  With `<!-- run exact -->` the output has to be the one shown, where a line `…` stands for any number of lines.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!--\s*run\b(?P<options>[^>]*)-->\s*\Z")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    body: str
    options: str | None  # None: not marked

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def exit(self) -> int:
        found = re.search(r"exit=(\d+)", self.options or "")
        return int(found[1]) if found else 0


def blocks_of(page: Path, text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        marker = MARKER.search(text[: match.start()])
        body = "\n".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines())
        line = text.count("\n", 0, match.start("body")) + 1
        found.append(Block(page, line, match["info"].strip(), body, marker and marker["options"]))
    return found


BLOCKS = [block for page in PAGES if page.is_file() for block in blocks_of(page, page.read_text(encoding="utf-8"))]
MARKED = [block for block in BLOCKS if block.options is not None]
CONSOLE = [block for block in MARKED if block.language == "console"]
PYTHON = {page: [b for b in MARKED if b.page == page and b.language == "python"] for page in PAGES}


def commands(body: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown."""
    joined = body.replace("\\\n", " ")
    parts = re.split(r"^\$ ", joined, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block starts with `$ `"
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts[1:])]


def matches(shown: str, real: str) -> bool:
    """Whether the output is the one shown; a line `…` there stands for any lines."""
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"[ ]*\n" for line in lines)
    return re.fullmatch(pattern, real.strip("\n") + "\n") is not None


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.name)
def test_console(block, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from replayssm.cli.main import build

    monkeypatch.chdir(tmp_path)
    app, runner = build(), CliRunner(env={"COLUMNS": "100"})
    listed = commands(block.body)
    for number, (command, shown) in enumerate(listed):
        name, *arguments = shlex.split(command, comments=True)
        assert name == "replayssm", f"only replayssm runs here, not {name}"
        result = runner.invoke(app, arguments)
        expected = block.exit if number == len(listed) - 1 else 0
        assert result.exit_code == expected, f"$ {command}\n{result.output}"
        if "exact" in (block.options or ""):
            assert matches(shown, result.output), f"$ {command}\n{result.output}"


@pytest.mark.parametrize("page", [p for p in PAGES if PYTHON[p]], ids=lambda page: page.name)
def test_python(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in PYTHON[page]:
        # The blank lines make a traceback point into the page.
        exec(compile("\n" * (block.line - 1) + block.body, str(page), "exec"), namespace)


def test_every_marked_block_is_of_a_kind_that_runs():
    assert [block.name for block in MARKED if block.language not in ("console", "python")] == []


def test_fences_are_ones_that_the_site_understands():
    # mkdocs shows "```python run" as one line of inline code: only a language and key="value" may follow the fence.
    wrong = [b.name for b in BLOCKS if not re.fullmatch(r"[\w+.-]*(\s+\w+=\"[^\"]*\")*|\{.*\}", b.language)]
    assert wrong == []


def test_the_reader_of_this_file():
    console = "```console\n$ replayssm x \\\n  y\nout\n…\nend\n$ replayssm z\n```\n"
    text = f"a\n\n<!-- run exit=2 exact -->\n{console}\n```python\n1\n```\n"
    first, second = blocks_of(ROOT / "README.md", text)
    assert (first.language, first.line, first.exit, first.options) == ("console", 5, 2, " exit=2 exact ")
    assert commands(first.body) == [("replayssm x    y", "out\n…\nend\n"), ("replayssm z", "")]
    assert (second.language, second.body, second.options) == ("python", "1", None)
    assert matches("out\n…\nend\n", "out\na\nb\nend\n")
    assert matches("out\n…\nend\n", "out\nend\n")
    assert not matches("out\n…\nend\n", "out\nlast\n")
    assert not matches("out\n", "out\nmore\n")
