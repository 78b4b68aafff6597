"""Train the multi-token-prediction head of a frozen model on the tokens that it was trained on.

python training/prepare.py --output out/data --tokenizer src/replayssm/models/docs_gdn
python training/train_mtp.py --data out/data --out out/mtp

A depth is one use of the head: the first reads the model's hidden states, each further one what the head said before
and the next token of the text. A query of depth d sees what the drafter's cache holds at that point: the first depth's
keys up to its own start, and its own draft's keys of the depths between. The target of every depth is the model's own
distribution, because a draft is right when it is the token that the model chooses.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

import fast_paths
from muon import Optimiser
from replayssm import models
from replayssm.engine.mtp_head import MtpHead
from score import load_heldout
from train import Batches, load_tokens, schedule


def masks(length: int, depths: int, device: torch.device) -> list[Tensor]:
    """For each depth d, which keys [length, d · length] each start sees: [1, 1, length, d · length]."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    own = torch.eye(length, dtype=torch.bool, device=device)
    return [torch.cat([causal, *[own] * depth], 1)[None, None] for depth in range(depths)]


def drafts(head: MtpHead, tokens: Tensor, hidden: Tensor, depths: int) -> list[Tensor]:
    """The head's hidden states at each depth.

    Args:
        head: on a model whose last hidden states for ``tokens`` are ``hidden``.
        tokens: [B, T].
        hidden: [B, T, hidden_size].
        depths: D.

    Returns:
        D times [B, S, hidden_size], S = T − D: at start s, depth d (from 1) predicts token s + d + 1.
    """
    starts = tokens.shape[1] - depths
    cache: Any = DynamicCache()
    states, hidden = [], hidden[:, :starts]
    positions = torch.arange(starts, device=tokens.device)[None]
    for depth, mask in enumerate(masks(starts, depths, tokens.device), 1):
        hidden = head(tokens[:, depth : depth + starts], hidden, positions + depth - 1, cache, mask)
        states.append(hidden)
    return states


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy [nats] between two distributions given as logits [..., vocabulary]."""
    return -(target.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def agreement(model: Any, head: MtpHead, tokens: Tensor, depths: int, batch: int) -> Tensor:
    """Where the head's likeliest token is the model's: bool [depths, M, starts].

    Both read the text's own tokens, so this is along given text; benchmarks/acceptance.py measures drafts.

    Args:
        tokens: [M, T] windows of held-out text.
    """
    found = []
    for window in tokens.split(batch):
        hidden = model.base_model(input_ids=window, use_cache=False).last_hidden_state
        wanted = head.output(hidden).argmax(-1)
        states = enumerate(drafts(head, window, hidden, depths), 1)
        found.append(torch.stack([head.output(s).argmax(-1) == wanted[:, d : d + s.shape[1]] for d, s in states]))
    return torch.cat(found, 1).cpu()


def rates(right: Tensor) -> dict[str, list[float]]:
    """How often each depth is right, from ``agreement``.

    Returns:
        "alone": everywhere. "after": where all depths before it were right, which is when a draft gets there; such
        places are easier, so this may rise with depth. "again": for comparison, how often the first depth is right
        where it was right at the starts before, as many as depths come before.
    """
    depths = len(right)
    after = right.cummin(0).values
    starts = right.shape[2] - depths + 1
    again = torch.stack([right[0, :, d : d + starts] for d in range(depths)]).cummin(0).values
    found = {"alone": right.double().mean((1, 2))}
    for name, kept in (("after", after), ("again", again)):
        counts = kept.double().sum((1, 2))
        found[name] = counts / torch.cat([torch.tensor([kept[0].numel()]), counts[:-1]]).clamp(min=1)
    return {name: [round(rate, 4) for rate in values.tolist()] for name, values in found.items()}


def windows(tokens: Tensor, length: int, most: int) -> Tensor:
    """The first ``most`` tokens in whole windows [M, length]."""
    count = min(len(tokens), most) // length
    if not count:
        raise ValueError(f"{len(tokens)} held-out tokens are fewer than a window of {length}")
    return tokens[: count * length].view(count, length).long()


def train(options: argparse.Namespace) -> dict:
    """Run the training described by the options; return the last held-out rates."""
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model, tokenizer = models.load(options.model, torch.float32, device)
    model.requires_grad_(False)
    if (given := options.data / "tokenizer" / "tokenizer.json").exists():
        own = models.resolve(options.model) / "tokenizer.json"
        if given.read_bytes() != own.read_bytes():
            raise SystemExit(f"{given} is another tokenizer than the model's: run prepare.py with --tokenizer")
    replaced = fast_paths.install(model) if device.type == "cuda" else []
    head = MtpHead(model).train()
    optimiser = Optimiser(head, options.rate, options.rate, options.weight_decay)
    data = load_tokens(options.data / "train.u16.xz").to(device)
    window = options.length + options.depths
    batches = Batches(data, window, options.batch, options.seed)
    parts = load_heldout(options.heldout, tokenizer)
    heldout = {name: windows(t, window, options.evaluate_tokens) for name, (t, _) in parts.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "mtp_log.jsonl").open("w")
    weights = torch.tensor([options.fade**depth for depth in range(options.depths)], device=device)
    weights = weights / weights.sum()

    def record(entry: dict) -> None:
        log.write(json.dumps(entry) + "\n")
        log.flush()
        print(json.dumps(entry), flush=True)

    def mixed() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def measure() -> dict:
        head.eval()
        with mixed():
            found = {
                name: rates(agreement(model, head, each.to(device), options.depths, options.batch))["after"]
                for name, each in heldout.items()
            }
        head.train()
        return found

    setting = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
    count = sum(p.numel() for p in head.parameters())
    record({"parameters": count, "device": str(device), "replaced": replaced, "torch": torch.__version__} | setting)
    record({"step": 0, "heldout": measure(), "seconds": round(time.monotonic() - begin, 1)})
    step, tokens, losses = 0, 0, []
    start = time.monotonic()
    while step < options.steps:
        progress = max(step / options.steps, (time.monotonic() - start) / options.seconds)
        if progress >= 1:
            break
        x, _ = batches(step)
        with mixed():
            with torch.no_grad():
                hidden = model.base_model(input_ids=x, use_cache=False).last_hidden_state
                wanted = head.output(hidden)
            states = drafts(head, x, hidden, options.depths)
            kept = states[0].shape[1]
            each = torch.stack([soft_loss(head.output(s), wanted[:, d : d + kept]) for d, s in enumerate(states, 1)])
        (each * weights).sum().backward()
        norm = nn.utils.clip_grad_norm_(head.parameters(), options.clip)
        optimiser.step(schedule(progress, step, options.warmup, 0.7))
        optimiser.zero_grad()
        losses.append(each.detach())
        step, tokens = step + 1, tokens + x.numel()
        if step % options.log_every == 0:
            mean = torch.stack(losses).mean(0).tolist()
            if not all(map(math.isfinite, mean)):
                raise FloatingPointError(f"the loss is {mean} at step {step}")
            seconds = round(time.monotonic() - begin, 1)
            record(
                {"step": step, "tokens": tokens, "loss": [round(v, 4) for v in mean], "norm": round(norm.item(), 3)}
                | {"seconds": seconds}
            )
            losses = []
    head.save(options.out / "mtp.safetensors")
    rounded = MtpHead.load(model, options.out)
    head.load_state_dict(rounded.state_dict())  # what is measured is what was written
    result = measure()
    record({"step": step, "tokens": tokens, "heldout": result, "seconds": round(time.monotonic() - begin, 1)})
    log.close()
    return result


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT, help="a shipped name or a folder")
    parser.add_argument("--data", type=Path, required=True, help="has train.u16.xz, encoded with the model's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for mtp.safetensors and mtp_log.jsonl")
    parser.add_argument("--heldout", type=Path, default=Path(models.__file__).parent / "heldout")
    parser.add_argument("--seconds", type=float, default=100, help="of training, apart from loading and measuring")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--depths", type=int, default=3, help="uses of the head, one on top of the other")
    parser.add_argument("--fade", type=float, default=0.8, help="weight of a depth's loss against the one before it")
    parser.add_argument("--length", type=int, default=1024, help="starts of drafts in a window")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.005)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--evaluate-tokens", type=int, default=65536, help="of each held-out source")
    parser.add_argument("--seed", type=int, default=0)
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
