import json

import pytest
import typer
from typer.testing import CliRunner

from replayssm import ReplayError
from replayssm.cli.common import UserError, command, console, human_bytes, human_time, print_json


def run(error: Exception | None):
    app = typer.Typer()

    @app.command()
    @command
    def act(number: int = 7) -> None:
        """Help."""
        if error is not None:
            raise error
        print_json({"number": number})

    return CliRunner().invoke(app, ["--number", "9"])


@pytest.mark.parametrize("error", [UserError("bad\nthing"), ReplayError("bad thing"), FileNotFoundError("bad thing")])
def test_expected_errors_are_one_line_on_stderr_and_exit_2(error):
    result = run(error)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: bad thing\n")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "none.json"
    with pytest.raises(FileNotFoundError) as raised:
        path.read_text()
    assert run(raised.value).stderr == f"error: no such file: {path}\n"


def test_other_errors_are_bugs_and_pass_through():
    result = run(KeyError("bug"))
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)


def test_arguments_still_reach_the_command():
    assert json.loads(run(None).stdout) == {"number": 9}


def test_json_refuses_what_json_has_not():
    with pytest.raises(ValueError, match="JSON compliant"):
        print_json({"x": float("nan")})


def test_console_writes_where_stdout_is_now(capsys):
    console().print("[bold]hello[/] 3")
    assert capsys.readouterr().out == "hello 3\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (4 * 2**20, "4.00 MiB"), (1.5 * 2**30, "1.50 GiB"), (2**41, "2.00 TiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(2, "2.00 s"), (0.000523, "0.523 ms"), (1.01e-5, "10.1 µs")])
def test_human_time(seconds, text):
    assert human_time(seconds) == text
