"""Tokens per second and acceptance of the engine, on the model in the box and held-out text.

    python benchmarks/engine.py                    # one thread; JSON lines on stdout
    python benchmarks/engine.py --texts 8 --new 64

Each line is one way to continue the same texts greedily: ``model.generate`` one text after the other, then engines of
several sizes, then every drafter. Times are CPU seconds of this process, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import replayssm
from replayssm import models
from replayssm.engine import Drafter, DraftModel, Engine, Params, PromptLookup, SuffixLookup


def shallow(model: Any, layers: int) -> Any:
    """The first layers of a model with its head: the cheapest draft model there is, untrained."""
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:layers]
    small.config.num_hidden_layers = layers
    return small


def drafters(model: Any) -> dict[str, Callable[[], Drafter | None]]:
    return {
        "none": lambda: None,
        "n-gram": lambda: PromptLookup(),
        "n-gram, 3 branches": lambda: PromptLookup(branches=3),
        "suffix": lambda: SuffixLookup(),
        "first 4 layers": lambda: DraftModel(shallow(model, 4)),
        "first 4 layers, tree 2-1": lambda: DraftModel(shallow(model, 4), branches=(2, 1)),
        "itself": lambda: DraftModel(copy.deepcopy(model)),
    }


def solo(model: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    begin = time.process_time()
    for ids in prompts:
        tokens = torch.tensor([ids])
        mask = torch.ones_like(tokens)
        model.generate(tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return {"way": "model.generate", "seconds": time.process_time() - begin}


def served(model: Any, prompts: list[list[int]], new: int, slots: int, name: str, drafter: Any) -> dict[str, Any]:
    with Engine(model, slots=slots, max_length=1024, drafter=drafter) as engine:
        engine.generate(prompts[:1], Params(max_tokens=2))
        begin = time.process_time()
        requests = engine.generate(prompts, Params(max_tokens=new, ignore_eos=True))
        seconds, counters = time.process_time() - begin, engine.counters
    steps = sum(sample.steps for request in requests for sample in request.samples)
    return {
        "way": "engine",
        "slots": slots,
        "drafter": name,
        "seconds": seconds,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "tokens_per_step": round(len(prompts) * new / steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each text that are given")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model, tokenizer = models.load(models.DEFAULT, dtype=torch.float32)
    whole = [tokenizer(text)["input_ids"] for text in models.heldout()]
    prompts = [ids[: asked.prompt] for ids in whole if len(ids) >= asked.prompt][: asked.texts]
    common = {
        "model": models.DEFAULT,
        "texts": len(prompts),
        "prompt": asked.prompt,
        "new": asked.new,
        "threads": asked.threads,
        "cpu": platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "replayssm": replayssm.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }
    ways = [lambda: solo(model, prompts, asked.new)]
    ways += [lambda s=s: served(model, prompts, asked.new, s, "none", None) for s in (1, 4, 8, 16, 32)]
    for slots in (1, 16):
        for name, make in drafters(model).items():
            if name != "none":
                ways.append(lambda s=slots, n=name, m=make: served(model, prompts, asked.new, s, n, m()))
    for way in ways:
        line = way()
        line["tokens_per_second"] = round(len(prompts) * asked.new / line["seconds"], 1)
        line["seconds"] = round(line["seconds"], 2)
        print(json.dumps({**line, **common}), flush=True)


if __name__ == "__main__":
    main()
