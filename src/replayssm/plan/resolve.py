"""From what a user types to a config: the name of a shipped one, a folder, or a config.json."""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from replayssm.checks import ReplayError

from .shape import ModelShape


@cache
def shipped() -> tuple[str, ...]:
    """Names of the published models whose sizes ship with the library."""
    folder = resources.files("replayssm").joinpath("data/configs")
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def shipped_config(name: str) -> dict[str, Any]:
    """The config of a shipped model. `source` says where its numbers come from."""
    file = resources.files("replayssm").joinpath(f"data/configs/{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def resolve(model: str) -> ModelShape:
    """The shape behind a shipped name (case and "_" do not matter), a folder with a config.json, or such a file."""
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _from_file(path / "config.json" if path.is_dir() else path)
    name = model.rsplit("/", 1)[-1].lower().replace("_", "-")
    if name in shipped():
        config = shipped_config(name)
        return ModelShape.from_config(config, name, source=config["source"])
    close = get_close_matches(name, shipped(), n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ReplayError(
        f"no model {model!r}: not a folder or config.json, and not shipped{hint}. Shipped: {', '.join(shipped())}"
    )


def _from_file(path: Path) -> ModelShape:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ReplayError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(config, dict):
        raise ReplayError(f"{path}: expected a JSON object, got {type(config).__name__}")
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return ModelShape.from_config(config, name, source=str(path))
