"""The small models of the library, and how they and others on disk are loaded.

One is in the package; the others, for size, only in the repository, where a checkout finds them by name as well.

Nothing here opens a connection: a name that is neither shipped nor a folder is an error, never a download.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from replayssm.checks import ReplayError

DEFAULT = "docs_gdn"
"""The model that commands use when none is named."""

REPOSITORY = ("docs_kda", "docs_mamba2")
"""The models that an installed package leaves out: the folder ``models/`` of the repository has them."""

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[2]
_HELDOUT = _HERE / "heldout"
# Between the documents of a held-out file (training/prepare.py writes it).
_SEPARATOR = "\n<|endoftext|>\n"


def names() -> tuple[str, ...]:
    """Names of the models at hand: those in the package and, in a checkout, those of the repository."""
    return tuple(sorted(_folders()))


def path(name: str) -> Path:
    """The Hugging Face folder of a model by its name.

    Raises:
        ReplayError: no such model, or one that this installation leaves out; the message says which there are.
    """
    found = _folders()
    key = name.lower().replace("-", "_")
    if key in found:
        return found[key]
    if key in REPOSITORY:
        raise ReplayError(
            f"model {key!r} is not in the installed package, which leaves it out for its size: check out the "
            f"repository and give the path of its folder models/{key}; here there is {', '.join(sorted(found))}"
        )
    close = get_close_matches(key, found, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ReplayError(
        f"no model {name!r}{hint}: expected a folder with a config.json, or one of {', '.join(sorted(found))}"
    )


def resolve(name_or_path: str | Path) -> Path:
    """The folder behind a shipped name (case and "-" do not matter) or a path.

    Raises:
        ReplayError: neither a shipped name nor a folder that holds a model.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return path(str(name_or_path))
    if not (folder / "config.json").is_file():
        raise ReplayError(f"{folder}: holds no model (no config.json)")
    return folder


def load(
    name_or_path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[Any, Any]:
    """Load a model and its tokenizer from disk, ready to generate.

    Args:
        name_or_path: a shipped name or a Hugging Face folder.
        dtype: of the weights; None takes the one that they are stored in.
        device: "cpu", "cuda", …

    Returns:
        What ``AutoModelForCausalLM`` and ``AutoTokenizer`` return.

    Raises:
        ReplayError: no such model, or transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype or "auto")
    except ModuleNotFoundError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, safetensors' own and others
        raise ReplayError(f"{folder}: transformers cannot load it: {_first_line(error)}") from error
    return model.to(device).eval(), tokenizer


def heldout(source: str | None = None) -> list[str]:
    """Documents that no shipped model was trained on.

    Args:
        source: one of ``heldout_sources()``; None takes all.

    Raises:
        ReplayError: no such source.
    """
    known = heldout_sources()
    if source is not None and source not in known:
        raise ReplayError(f"no held-out source {source!r}: expected one of {', '.join(known)}")
    files = [known[source]] if source is not None else list(known.values())
    return [text for file in files for text in file.read_text(encoding="utf-8").split(_SEPARATOR) if text.strip()]


def heldout_sources() -> dict[str, Path]:
    """Name -> file of each source of held-out text, as the index lists them (with version and licence)."""
    index = json.loads((_HELDOUT / "index.json").read_text(encoding="utf-8"))
    return {entry["name"]: _HELDOUT / entry["file"] for entry in index}


def _folders() -> dict[str, Path]:
    """Name -> folder of each model at hand."""
    shelves = [_HERE]
    if (_CHECKOUT / "pyproject.toml").is_file():
        shelves.append(_CHECKOUT / "models")
    return {file.parent.name: file.parent for shelf in shelves for file in shelf.glob("*/config.json")}


def _first_line(error: Exception) -> str:
    """The first sentence of a message that may go on for a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
