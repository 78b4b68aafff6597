"""Measure a model in bits per byte of held-out text.

python training/score.py --model src/replayssm/models/docs_gdn --heldout src/replayssm/models/heldout
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEPARATOR = "<|endoftext|>"


def load_heldout(folder: Path, tokenizer: Any) -> dict[str, tuple[Tensor, int]]:
    """Return the tokens and the bytes (separators not counted) of each held-out file."""
    parts = {}
    for path in sorted(folder.glob("*.txt")):
        text = SEPARATOR + path.read_text(encoding="utf-8").replace(f"\n{SEPARATOR}\n", SEPARATOR)
        ids = tokenizer.encode(text)
        parts[path.stem] = (torch.tensor(getattr(ids, "ids", ids)), len(text.replace(SEPARATOR, "").encode()))
    return parts


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, tokens: Tensor, size: int, length: int = 2048, batch: int = 16, limit: int | None = None
) -> float:
    """Return the bits per byte of `tokens`, which stand for `size` bytes, in windows of `length` tokens.

    Each window starts from an empty state. `limit` evaluates the first tokens only.
    """
    total = len(tokens) - 1
    count = min(total, limit or total)
    count = count // length * length or count  # whole windows, or the one short one
    length = min(length, count)
    device = next(model.parameters()).device
    inputs = tokens[:count].view(-1, length)
    targets = tokens[1 : count + 1].view(-1, length)
    nats = 0.0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        logits = model(input_ids=x.to(device).long(), use_cache=False).logits
        nats += F.cross_entropy(logits.float().flatten(0, 1), y.to(device).long().flatten(), reduction="sum").item()
    return nats / math.log(2) / (size * count / total)


def evaluate(model: nn.Module, parts: dict[str, tuple[Tensor, int]], **options: Any) -> dict[str, float]:
    """Return bits per byte by source, and for all of them together weighted by bytes (`all`)."""
    training = model.training
    model.eval()
    result = {name: bits_per_byte(model, tokens, size, **options) for name, (tokens, size) in parts.items()}
    weight = sum(size for _, size in parts.values())
    result["all"] = sum(result[name] * size for name, (_, size) in parts.items()) / weight
    model.train(training)
    return result


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--limit", type=int, help="tokens of each source")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    begin = time.monotonic()
    parts = load_heldout(options.heldout, tokenizer)
    result = evaluate(model.to(options.device), parts, length=options.length, batch=options.batch, limit=options.limit)
    print(json.dumps({k: round(v, 4) for k, v in result.items()} | {"seconds": round(time.monotonic() - begin, 1)}))


if __name__ == "__main__":
    main()
