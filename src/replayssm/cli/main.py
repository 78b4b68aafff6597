"""The command `replayssm`: the app, and an entry point that has one line for a missing package."""

import io
import sys
from typing import Annotated, Any

# Package -> the extra that brings it.
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "pydantic": "cli",
    "matplotlib": "bench",
    "transformers": "transformers",
    "safetensors": "transformers",
}


def build() -> Any:
    """The typer app. Imports wait until here, so that a missing package becomes a message."""
    import typer

    from replayssm import __version__

    from .bench_model import bench
    from .check import check
    from .drift import drift
    from .explain import explain
    from .generate import generate
    from .tune import tune

    app = typer.Typer(
        name="replayssm",
        help="Decode hybrid models from a checkpoint of the state and a buffer of recent inputs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"replayssm {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="print the version", callback=show_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    for function in (generate, check, explain, drift, tune):
        app.command()(function)
    app.add_typer(bench)
    return app


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without some character shows another one instead
    try:
        build()()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        print(f"error: this needs {package}: pip install 'replayssm[{_EXTRAS[package]}]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
