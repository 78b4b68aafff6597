"""Fixtures of the command's tests: models on disk, and a runner."""

from collections.abc import Callable

import pytest
from cli_model import make
from click.testing import Result
from typer.testing import CliRunner

from replayssm.cli.main import build


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = str(make(tmp_path_factory.mktemp("model") / kind, kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def hybrid(folders: Callable[[str], str]) -> str:
    return folders("hybrid")


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Run a command in this process; `threads` keeps the machine free for others."""
    app, runner = build(), CliRunner()

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        return runner.invoke(app, list(arguments), input=stdin)

    return run
