"""`replayssm generate`: text from a hybrid model that decodes from a checkpoint and a buffer, as it is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from replayssm import models
from replayssm.layout import Precision

from . import setup
from .common import UserError, command, console, human_bytes, human_time, print_json
from .ledger import Ledger
from .options import DTYPE, MODEL, PRECISION, WINDOW
from .speculate import FORMS, Speculation


class Printer:
    """A streamer for ``model.generate``: text as soon as it is sure, whatever the tokens' borders.

    Bytes of one character may come in several tokens. Text is decoded from the tokens of the last piece on and held
    back while it ends within a character.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        """Pieces of text go to ``write``."""
        self.tokens: list[int] = []
        self.text = ""
        self._tokenizer, self._write = tokenizer, write
        self._prompt = True
        self._from = self._done = 0  # where decoding starts, and up to where the text was written

    def put(self, value: torch.Tensor) -> None:
        """Take new tokens; the first call brings the prompt."""
        if self._prompt:
            self._prompt = False
            return
        self.tokens += value.flatten().tolist()
        self._emit(hold=True)

    def end(self) -> None:
        """Write what was held back."""
        self._emit(hold=False)

    def _emit(self, hold: bool) -> None:
        known = self._decode(self.tokens[self._from : self._done])
        text = self._decode(self.tokens[self._from :])
        if len(text) > len(known) and not (hold and text.endswith("\N{REPLACEMENT CHARACTER}")):
            self.text += text[len(known) :]
            self._write(text[len(known) :])
            self._from, self._done = self._done, len(self.tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


@command
def generate(
    prompt: Annotated[str | None, typer.Argument(help="text to continue (or --file, stdin, a built-in one)")] = None,
    file: Annotated[Path | None, typer.Option(help="read the prompt from a file")] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = models.DEFAULT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate at most")] = 200,
    speculate: Annotated[str, typer.Option(help=f"where drafts come from: {FORMS}")] = "off",
    window: Annotated[int | None, WINDOW] = None,
    precision: Annotated[str, PRECISION] = "fp32",
    dtype: Annotated[str, DTYPE] = "fp32",
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="sample from this share of probability")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="sample from so many tokens")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="of sampling (default: a new one each time)")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads (default: 1 for a small model)")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="end with a table of what was moved and kept")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Continue a prompt. The recurrent layers decode from a checkpoint and a buffer; the text is that of stock."""
    speculation = Speculation.parse(speculate)
    sampling = _sampling(temperature, top_p, top_k)
    policy = Precision.preset(precision)
    text = _prompt(prompt, file, announce=not json)
    seed = torch.seed() % 2**31 if seed is None else seed

    from replayssm.integrations.transformers import attach

    target, tokenizer = setup.load(model, dtype)
    setup.set_threads(target, threads)
    room = {"window": speculation.window(window), "max_draft": speculation.max_draft, "precision": policy}
    attach(target, **room)
    assistant = _assistant(speculation, dtype, room, tokenizer)
    ids = setup.encode(tokenizer, text)
    printer = Printer(tokenizer, (lambda piece: None) if json else _write)
    torch.manual_seed(seed)
    with Ledger(target) as ledger:
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=printer,
            pad_token_id=tokenizer.pad_token_id or 0,
            **sampling,
            **speculation.options(assistant),
        )
    report = ledger.report(ids.shape[1], len(printer.tokens))
    if json:
        settings = {"max_new_tokens": max_new_tokens, "speculate": str(speculation), "window": room["window"]}
        settings |= {"precision": precision, "dtype": dtype, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        print_json({"model": model, "prompt": text, "text": printer.text, "seed": seed} | settings | {"stats": report})
        return
    _write("\n")
    if stats:
        _show(report, speculation)


def _prompt(prompt: str | None, file: Path | None, announce: bool) -> str:
    """The prompt: the argument, the file, what was piped in, or the built-in one."""
    if prompt is not None and file is not None:
        raise UserError("give a prompt or --file, not both")
    if file is not None:
        text = setup.read_text(file)
    elif prompt is not None:
        text = setup.decode(os.fsencode(prompt), "the prompt")  # as it was typed, whatever the locale made of it
    else:
        text = setup.piped()
        if not text.strip():
            if announce:
                print(f"No prompt given; continuing this one:\n\n{setup.BUILT_IN_PROMPT}", file=sys.stderr, flush=True)
            return setup.BUILT_IN_PROMPT
    if not text.strip():
        raise UserError("the prompt is empty")
    return text


def _sampling(temperature: float, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """What ``model.generate`` takes, whatever the model's own settings of these are."""
    if temperature == 0:
        if top_p is not None or top_k is not None:
            raise UserError("--top-p and --top-k choose among samples: give --temperature above 0 as well")
        return {"do_sample": False, "num_beams": 1}
    # 1.0 and 0 switch the two filters off.
    return {
        "do_sample": True,
        "num_beams": 1,
        "temperature": temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": top_k or 0,
    }


def _assistant(speculation: Speculation, dtype: str, room: dict[str, Any], tokenizer: Any) -> Any | None:
    """The assistant model, attached if it is recurrent itself."""
    if speculation.assistant is None:
        return None
    from replayssm.integrations.transformers import attach

    found, own = setup.load(speculation.assistant, dtype)
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"--speculate {speculation}: the assistant has another vocabulary than the model")
    # transformers' own word for a model whose cache it cannot roll back: attention-only assistants need nothing.
    return attach(found, **room) if found._is_stateful else found


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show(report: dict[str, Any], speculation: Speculation) -> None:
    moved, sizes, drafts = report["state_bytes"], report["sequence_bytes"], report["drafts"]
    table = Table("", "this run", "conventional", "", title_justify="left")
    table.add_row("tokens", f"{report['tokens']:,} after a prompt of {report['prompt_tokens']:,}", "", "")
    speed = f"{report['tokens_per_second']:.1f} tokens/s"
    table.add_row("time", f"{human_time(report['seconds'])}, {speed}", "", "")
    table.add_row("model steps", f"{report['model_steps']:,}", f"{report['tokens']:,}", "")
    if speculation.drafts:
        share = f"{drafts['accepted'] / drafts['proposed']:.0%}" if drafts["proposed"] else "none drafted"
        table.add_row("drafts accepted", f"{drafts['accepted']:,} of {drafts['proposed']:,}", "", share)
    table.add_row("folds", f"{report['folds']:,}", "", "")
    table.add_section()
    for what in ("read", "written"):
        table.add_row(f"state and buffer {what}", *_against(moved[what], moved[f"conventional_{what}"]))
    here = moved["read"] + moved["written"]
    table.add_row("together", *_against(here, moved["conventional_read"] + moved["conventional_written"]))
    table.add_section()
    for name, size in sizes.items():
        if size:
            table.add_row(f"memory: {name.replace('_', ' ')}", human_bytes(size), "", "")
    table.add_row("memory of the sequence", human_bytes(sum(sizes.values())), "", "")
    console().print(table)


def _against(here: int, conventional: int) -> tuple[str, str, str]:
    ratio = f"{here / conventional:.2f}×" if conventional else ""
    return human_bytes(here), human_bytes(conventional), ratio
