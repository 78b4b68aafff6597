"""`replayssm generate`: text from a hybrid model that decodes from a checkpoint and a buffer, as it is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from replayssm import models

from . import setup
from .common import UserError, command, console, human_bytes, human_time, print_json
from .ledger import EngineLedger, Ledger
from .options import DTYPE, MODEL, PRECISION, WINDOW
from .setting import Setting
from .speculate import FORMS, Speculation

if TYPE_CHECKING:
    from replayssm.engine import Params


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
    batch_file: Annotated[Path | None, typer.Option(help="many prompts: JSON lines (see docs/cli.md)")] = None,
    output: Annotated[Path | None, typer.Option(help="with --batch-file: where answers are appended")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="with --batch-file: prompts at a time (default: 8)")] = None,
    memory_gb: Annotated[float | None, typer.Option(min=0, help="with --batch-file: instead of --slots, GB")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="with --batch-file: most tokens of a prompt and its answer (2048)")
    ] = None,
) -> None:
    """Continue a prompt. The recurrent layers decode from a checkpoint and a buffer; the text is that of stock."""
    setting = Setting(model, dtype, precision, Speculation.parse(speculate), window, threads)
    room = setting.room
    if batch_file is not None:
        if prompt is not None or file is not None or stats:
            raise UserError("--batch-file takes no prompt, no --file and no --stats")
        from . import batch_file as batch

        defaults = _params(max_new_tokens, temperature, top_p, top_k)
        capacity = {"slots": slots, "memory": None if memory_gb is None else int(memory_gb * 1e9)}
        capacity["max_length"] = max_length or 2048
        batch.command(setting, batch_file, output, defaults, seed or 0, capacity, json)
        return
    for name, value in (("output", output), ("slots", slots), ("memory-gb", memory_gb), ("max-length", max_length)):
        if value is not None:
            raise UserError(f"--{name} goes with --batch-file")
    if temperature == 0 and (top_p, top_k) != (None, None):
        raise UserError("--top-p and --top-k choose among samples: give --temperature above 0 as well")
    text = _prompt(prompt, file, announce=not json)
    seed = torch.seed() % 2**31 if seed is None else seed
    printer, report = _one(setting, text, replace(_params(max_new_tokens, temperature, top_p, top_k), seed=seed), json)
    if json:
        settings = {"max_new_tokens": max_new_tokens, "speculate": str(setting.speculation), "window": room["window"]}
        settings |= {"precision": precision, "dtype": dtype, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        print_json({"model": model, "prompt": text, "text": printer.text, "seed": seed} | settings | {"stats": report})
        return
    _write("\n")
    if stats:
        _show(report, setting.speculation)


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


def _params(new: int, temperature: float, top_p: float | None, top_k: int | None) -> Params:
    """The options of sampling, with those left out switched off."""
    from replayssm.engine import Params

    return Params(new, temperature, top_k or 0, 1.0 if top_p is None else top_p)


def _one(setting: Setting, text: str, params: Params, quiet: bool) -> tuple[Printer, dict[str, Any]]:
    """Continue one prompt and count what was done."""
    target, tokenizer = setting.load()
    way = _by_engine if setting.speculation.engine_only else _by_transformers
    ids = setup.encode(tokenizer, text)
    printer = Printer(tokenizer, (lambda piece: None) if quiet else _write)
    ledger = way(setting, target, tokenizer, ids, printer, params)
    return printer, ledger.report(ids.shape[1], len(printer.tokens))


def _by_transformers(
    setting: Setting, target: Any, tokenizer: Any, ids: torch.Tensor, printer: Printer, params: Params
) -> Ledger:
    from replayssm.integrations.transformers import attach

    attach(target, **setting.room)
    assistant = setting.assistant(tokenizer)
    # transformers' own word for a model whose cache it cannot roll back: attention-only assistants need nothing.
    if assistant is not None and assistant._is_stateful:
        attach(assistant, **setting.room)
    # Whatever the model's own settings of these are.
    sampling: dict[str, Any] = {"do_sample": params.temperature > 0, "num_beams": 1}
    if sampling["do_sample"]:
        sampling |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    torch.manual_seed(params.seed or 0)
    with Ledger(target) as ledger:
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            streamer=printer,
            pad_token_id=tokenizer.pad_token_id or 0,
            **sampling,
            **setting.speculation.options(assistant),
        )
    return ledger


def _by_engine(
    setting: Setting, target: Any, tokenizer: Any, ids: torch.Tensor, printer: Printer, params: Params
) -> Ledger:
    size = ids.shape[1]
    room = {"slots": 1, "max_length": size + (params.max_tokens or 0), "chunk": size}
    with setting.engine(target, tokenizer, **room) as engine, EngineLedger(engine) as ledger:
        printer.put(ids)
        for event in engine.stream(ids[0].tolist(), params):
            printer.put(torch.tensor(event.tokens))
        printer.end()
    return ledger


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
