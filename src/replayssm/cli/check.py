"""`replayssm check`: stock and replay side by side on real prompts, plain and speculative, and every layer's state."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Column, Table
from torch import Tensor

from replayssm import models

from . import setup
from .audit import StateAudit
from .common import UserError, command, console, print_json
from .options import DTYPE, MODEL, WINDOW
from .speculate import Speculation

PROMPT_LENGTH = 500
"""Characters of a held-out document that make a prompt."""

# Largest logit difference over the largest logit: rounding in other places, over some dozen layers.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
STATE_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Run:
    """What a generation gave.

    Attributes:
        tokens: [N] new ones.
        logits: [N, vocabulary] that each was chosen from, float32.
    """

    tokens: Tensor
    logits: Tensor


@command
def check(
    model: Annotated[str, typer.Argument(help=MODEL)] = models.DEFAULT,
    prompts: Annotated[
        Path | None, typer.Option(help="one prompt a line, or a .json list (default: held-out text that ships)")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens to generate a prompt")] = 48,
    window: Annotated[int | None, WINDOW] = None,
    draft: Annotated[int, typer.Option(min=1, help="drafts of the speculative run (prompt lookup)")] = 4,
    dtype: Annotated[str, DTYPE] = "fp32",
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Compare a model's outputs with and without replay. Exit code 0: all the same, 1: not, 2: it cannot be run.

    The same: equal greedy tokens and logits to rounding. Where stock itself is undecided, its two best logits closer
    than rounding, a different token is a tie and no failure; what follows it is not compared.
    """
    texts = _prompts(prompts)
    target, tokenizer = setup.load(model, dtype)
    setup.set_threads(target, None)
    speculation = Speculation("lookup", draft)
    inputs = [setup.encode(tokenizer, text) for text in texts]
    plain = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id or 0}
    stock = [_run(target, ids, **plain) for ids in inputs]

    from replayssm.integrations.transformers import attach, detach

    attach(target, window=speculation.window(window), max_draft=speculation.max_draft)
    try:
        with StateAudit(target) as audit:
            greedy = [_run(target, inputs[0], **plain)]
            layers = audit.errors()
        greedy += [_run(target, ids, **plain) for ids in inputs[1:]]
        drafted = [_run(target, ids, **plain, **speculation.options(None)) for ids in inputs]
    finally:
        detach(target)
    rows = [
        {"prompt": text, "prompt_tokens": ids.shape[1], "mode": mode} | compare(before, after, target.dtype)
        for text, ids, before, *runs in zip(texts, inputs, stock, greedy, drafted, strict=True)
        for mode, after in zip(("greedy", str(speculation)), runs, strict=True)
    ]
    for row in layers:
        row["passed"] = row["state_error"] <= STATE_TOLERANCE
    passed = all(row["passed"] for row in (*rows, *layers))
    if json:
        print_json({"model": model, "dtype": dtype, "passed": passed, "prompts": rows, "layers": layers})
    else:
        _show(rows, layers, passed)
    if not passed:
        raise typer.Exit(code=1)


def compare(stock: Run, replay: Run, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Tokens and logits of two runs of a model of this dtype, up to and including the first token that differs."""
    count = min(len(stock.tokens), len(replay.tokens))
    differs = (stock.tokens[:count] != replay.tokens[:count]).nonzero()
    first = int(differs[0]) if len(differs) else None
    if first is None and len(stock.tokens) != len(replay.tokens):
        first = count  # one of them stopped
    span = count if first is None else min(first + 1, count)
    difference = (stock.logits[:span] - replay.logits[:span]).abs().max().item()
    scale = stock.logits[:span].abs().max().item()
    allowed = TOLERANCE.get(dtype, 5e-2) * scale
    margin = None
    if first is not None and first < count:
        here = stock.logits[first]
        margin = (here[stock.tokens[first]] - here[replay.tokens[first]]).item()
    tie = margin is not None and margin <= 2 * allowed
    return {
        "tokens": len(replay.tokens),
        "tokens_equal": first is None,
        "first_difference": first,
        "margin": margin,
        "tie": tie,
        "max_logit_difference": difference,
        "max_logit": scale,
        "passed": difference <= allowed and (first is None or tie),
    }


def _run(model: Any, ids: Tensor, **options: Any) -> Run:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return Run(out.sequences[0, ids.shape[1] :], torch.cat(out.logits))


def _prompts(file: Path | None) -> list[str]:
    """The file's prompts, or the beginning of one held-out document of each source."""
    if file is None:
        # The first document of each source that goes on long enough after the prompt.
        sources = [models.heldout(source) for source in models.heldout_sources()]
        return [next(text for text in texts if len(text) > 4 * PROMPT_LENGTH)[:PROMPT_LENGTH] for texts in sources]
    text = setup.read_text(file)
    if file.suffix == ".json":
        try:
            found = jsonlib.loads(text)
        except ValueError as error:
            raise UserError(f"{file}: not JSON ({error})") from None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise UserError(f"{file}: expected a list of strings")
    else:
        found = text.splitlines()
    found = [each for each in found if each.strip()]
    if not found:
        raise UserError(f"{file}: holds no prompt")
    return found


def _show(rows: list[dict[str, Any]], layers: list[dict[str, Any]], passed: bool) -> None:
    out = console()
    columns = ("prompt", 22), ("mode", None), ("equal tokens", None), ("logits ±", None), ("of", None), ("", None)
    table = Table(*(Column(name, no_wrap=True, max_width=width) for name, width in columns))
    for row in rows:
        equal = f"{row['tokens'] if row['tokens_equal'] else row['first_difference']} of {row['tokens']}"
        numbers = f"{row['max_logit_difference']:.1e}", f"{row['max_logit']:.1f}"
        verdict = _verdict(row["passed"]) + (" (a tie)" if row["tie"] else "")
        table.add_row(" ".join(row["prompt"].split()), row["mode"], equal, *numbers, verdict)
    out.print(table)
    table = Table("layer", "recurrence", "folds", "state against float64", "")
    for row in layers:
        numbers = str(row["layer"]), row["recurrence"], str(row["folds"]), f"{row['state_error']:.1e}"
        table.add_row(*numbers, _verdict(row["passed"]))
    out.print(table)
    out.print(f"{_verdict(passed)}: {sum(row['passed'] for row in rows)} of {len(rows)} runs equal stock")


def _verdict(passed: bool) -> str:
    return "[green]PASS[/]" if passed else "[bold red]FAIL[/]"
