"""How many tokens a step brings with each drafter, and what that is worth in time.

    python benchmarks/acceptance.py --out benchmarks/results/acceptance-cpu.jsonl           # the CPU, one thread
    python benchmarks/acceptance.py --device cuda --slots 16 --texts 3 --repeat 1 --seconds 140 --out rows.jsonl
    python benchmarks/acceptance.py --plot docs/acceptance-cpu.png benchmarks/results/acceptance-cpu.jsonl

The model in the box continues held-out texts, as many of every source, greedily and sampled. Each row is one drafter
with one number of slots and one temperature: tokens a step (a draft's accepted tokens and the model's own one), overall
and by source, and tokens a second, prompts included, against the engine without drafts. All are measured in turn,
``--repeat`` times, and the fastest counts. On the CPU times are CPU seconds of this process, so that other processes do
not count. On a GPU everything is run twice before it is timed: a first use compiles, the second one captures. A model
or a head that is not there is left out, and said so.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import replayssm
from engine import shallow
from replayssm import ReplayError, models
from replayssm.bench.rows import append, provenance
from replayssm.engine import (
    Drafter,
    DraftModel,
    Engine,
    MtpDrafter,
    MtpHead,
    Params,
    PromptLookup,
    Request,
    SuffixLookup,
)
from replayssm.engine.loop import Counters

Way = tuple[str, int, Callable[[], Drafter | None]]


def ways(model: Any, drafts: list[Any]) -> list[Way]:
    """Name, most drafts and maker of every drafter; ``drafts``: further models with the same vocabulary."""
    found: list[Way] = [
        ("n-gram", 7, lambda: PromptLookup()),
        ("n-gram, 3 branches", 7, lambda: PromptLookup(branches=3)),
        ("suffix", 7, lambda: SuffixLookup()),
    ]
    try:
        head = MtpHead.load(model)
        found += [(f"mtp, up to {k}", k, lambda: MtpDrafter(head)) for k in (1, 2, 3, 5)]
        found += [
            ("mtp, always 3", 3, lambda: MtpDrafter(head, cost=0.01)),
            ("mtp, tree 2-2-1", 7, lambda: MtpDrafter(head, branches=(2, 2, 1))),
        ]
    except ReplayError as error:
        print(f"left out: {error}", flush=True)
    for other in drafts:
        name = Path(other.name_or_path).name
        found.append((f"draft model: {name}", 4, lambda other=other: DraftModel(other)))
        found.append((f"draft model: {name}, tree 2-1", 7, lambda other=other: DraftModel(other, branches=(2, 1))))
    return [
        *found,
        ("draft model: first 4 layers", 4, lambda: DraftModel(shallow(model, 4))),
        ("draft model: itself", 4, lambda: DraftModel(copy.deepcopy(model))),
    ]


def prompts(tokenizer: Any, each: int, size: int) -> list[tuple[str, list[int]]]:
    """The beginnings of ``each`` held-out texts of every source, those that are long enough."""
    found = []
    for source in models.heldout_sources():
        listed = (tokenizer(text)["input_ids"] for text in models.heldout(source) if len(text) > 4 * size)
        found += [(source, ids[:size]) for ids in itertools.islice((ids for ids in listed if len(ids) >= size), each)]
    return found


def measure(
    model: Any,
    texts: list[tuple[str, list[int]]],
    tries: list[Params],
    slots: int,
    most: int,
    drafter: Any,
    graphs: bool,
) -> list[dict[str, Any]]:
    """Continue the texts in each way of ``tries``; tokens a step and a second."""
    device = next(model.parameters()).device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    room = len(texts[0][1]) + max(params.max_tokens or 0 for params in tries)
    options = {"window": 16 + most, "max_draft": 1 + most, "graphs": graphs}
    ids, found = [ids for _, ids in texts], []
    with Engine(model, slots=slots, max_length=room, drafter=drafter, **options) as engine:
        if device.type == "cuda":
            for params in 2 * tries:
                engine.generate(ids, params)
        else:
            engine.generate(ids[:1], tries[0])
        for params in tries:
            before, begin = copy.copy(engine.counters), clock()
            requests = engine.generate(ids, params)
            found.append(figures(texts, requests, clock() - begin, before, engine.counters))
    return found


def figures(
    texts: list[tuple[str, list[int]]], requests: list[Request], seconds: float, before: Counters, after: Counters
) -> dict[str, Any]:
    """What one run brought."""
    by_source: dict[str, list[int]] = {}
    for (source, _), request in zip(texts, requests, strict=True):
        steps, tokens = by_source.setdefault(source, [0, 0])
        by_source[source] = [steps + request.samples[0].steps, tokens + len(request.tokens)]
    steps, tokens = (sum(pair[i] for pair in by_source.values()) for i in (0, 1))
    return {
        "tokens": tokens,
        "tokens_per_step": round(tokens / steps, 3),
        "by_source": {source: round(n / s, 3) for source, (s, n) in by_source.items()},
        "drafted": after.drafted - before.drafted,
        "accepted": after.accepted - before.accepted,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def command(words: Sequence[str]) -> str:
    """What was run, but for the place that rows go to."""
    at = words.index("--out")
    return shlex.join(["python", "benchmarks/acceptance.py", *words[:at], *words[at + 2 :]])


def run(asked: argparse.Namespace) -> None:
    until = time.monotonic() + asked.seconds
    torch.set_num_threads(asked.threads)
    dtype = torch.float32 if asked.dtype == "fp32" else torch.bfloat16
    model, tokenizer = models.load(asked.model, dtype, asked.device)
    others = []
    for name in asked.drafts:
        try:
            others.append(models.load(name, dtype, asked.device)[0])
        except ReplayError as error:
            print(f"left out: {error}", flush=True)
    texts = prompts(tokenizer, asked.texts, asked.prompt)
    common = {"benchmark": "acceptance", "model": asked.model, "dtype": asked.dtype, "texts": len(texts)}
    common |= {"prompt": asked.prompt, "new": asked.new, "transformers": transformers.__version__}
    common |= {"replayssm": replayssm.__version__} | provenance(asked.device, asked.commit)
    common |= {"command": command(sys.argv[1:])}
    nobody: Way = ("none", 0, lambda: None)
    chosen = [nobody, *(way for way in ways(model, others) if asked.only in way[0])]
    tries = [Params(asked.new, temperature, seed=1, ignore_eos=True) for temperature in asked.temperatures]
    for slots in asked.slots:
        best: dict[str, list[dict[str, Any]]] = {}
        for turn, (name, most, make) in itertools.product(range(asked.repeat), chosen):
            if time.monotonic() < until:
                lines = measure(model, texts, tries, slots, most, make(), not asked.no_graphs)
                pairs = zip(best.get(name, lines), lines, strict=True)
                best[name] = [max(pair, key=lambda line: line["tokens_per_second"]) for pair in pairs]
            if name not in best or "none" not in best:
                print(f"out of time before {name}, {slots} slots", flush=True)
            elif turn == asked.repeat - 1:
                for params, line, plain in zip(tries, best[name], best["none"], strict=True):
                    setting = {"drafter": name, "drafts": most, "slots": slots, "temperature": params.temperature}
                    ratio = {"speedup": round(line["tokens_per_second"] / plain["tokens_per_second"], 3)}
                    row = {**setting, **line, **ratio, **common}
                    append(asked.out, row)
                    print(json.dumps({key: row[key] for key in list(row)[:12]}), flush=True)


def plot(paths: list[Path], picture: Path) -> None:
    """Speed-up over tokens a step, a panel for each temperature."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["drafter"] != "none"]
    temperatures = sorted({row["temperature"] for row in rows})
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    slots = sorted({row["slots"] for row in rows})
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    figure, panels = plt.subplots(1, len(temperatures), figsize=(11, 4.6), dpi=120, squeeze=False, sharey=True)
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        for row in rows:
            if row["temperature"] == temperature:
                colour = colours[names.index(row["drafter"]) % 20]
                axes.plot(
                    row["tokens_per_step"],
                    row["speedup"],
                    linestyle="",
                    color=colour,
                    marker="os^Dv"[slots.index(row["slots"])],
                    label=row["drafter"] if row["slots"] == slots[0] else None,
                )
        axes.axhline(1, color="grey", linewidth=0.8)
        how = "greedy" if temperature == 0 else f"temperature {temperature}"
        axes.set(title=f"{rows[0]['model']}, {how}", xlabel="tokens a step")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed against no drafts")
    marks = ", ".join(f"{mark}: {n}" for mark, n in zip(("circle", "square", "triangle"), slots, strict=False))
    figure.suptitle(f"slots: {marks}; {rows[0]['gpu']}", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.045 * -(-len(labels) // 3) + 0.02, 1, 1))
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument(
        "--drafts", nargs="*", default=["docs_mamba2"], help="models with the same vocabulary that draft"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--texts", type=int, default=2, help="of each source")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each text that are given")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after so many")
    parser.add_argument("--only", default="", help="drafters whose name has this in it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true", help="on CUDA: capture nothing")
    parser.add_argument("--commit", default="", help="where the package is in no checkout")
    parser.add_argument("--out", type=Path, help="JSON lines to append to")
    parser.add_argument("--plot", type=Path, nargs="+", help="a picture, and the rows to draw; measures nothing")
    asked = parser.parse_args()
    if asked.plot:
        plot(asked.plot[1:], asked.plot[0])
    elif asked.out:
        run(asked)
    else:
        parser.error("--out or --plot is needed")


if __name__ == "__main__":
    main()
