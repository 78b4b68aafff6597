"""The command as a whole: help, version, usage errors, and packages that are not there."""

import builtins
import sys

import pytest

import replayssm
from replayssm.cli import main


def test_version_and_help(cli):
    assert cli("--version").stdout == f"replayssm {replayssm.__version__}\n"
    for arguments in ([], ["--help"]):
        text = cli(*arguments).output
        assert all(name in text for name in ("generate", "check", "explain", "--version"))


@pytest.mark.parametrize("name", ["generate", "check", "explain"])
def test_every_command_has_help_and_json(cli, name):
    result = cli(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw"], "No such command 'draw'"),
        (["generate", "x", "--windw", "3"], "No such option: --windw"),
        (["generate", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["generate", "x", "--seed", "one"], "Invalid value for '--seed'"),
        (["check", "x", "--draft", "0"], "Invalid value for '--draft'"),
    ],
)
def test_usage_errors(cli, arguments, message):
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("typer", ["--version"], "cli"),
        ("rich", ["--version"], "cli"),
        ("transformers", ["generate", "x", "--model", "MODEL"], "transformers"),
        ("transformers", ["check", "MODEL", "--prompts", "FILE"], "transformers"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, capsys, hybrid, package, arguments, extra):
    for name in [name for name in sys.modules if name.partition(".")[0] in (package, "replayssm") and "cli" in name]:
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and hasattr(sys.modules[parent], child):
            # Importing it again sets the parent's attribute; afterwards both are to be the old module.
            monkeypatch.setattr(sys.modules[parent], child, getattr(sys.modules[parent], child))
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    arguments = [hybrid if each == "MODEL" else each for each in arguments]
    monkeypatch.setattr(
        sys, "argv", ["replayssm", *arguments, *(["--prompts", __file__] if "check" in arguments else [])]
    )
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"error: this needs {package}: pip install 'replayssm[{extra}]'\n"


def test_another_missing_module_is_a_fault_and_not_hidden(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.setattr(main, "build", broken)
    with pytest.raises(ModuleNotFoundError):
        main.main()
