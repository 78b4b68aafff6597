"""Train a small language model of any causal architecture of transformers, described by a configuration file.

python training/train.py --config training/docs_gdn.json --data out/data --output out/docs_gdn
"""

import argparse
import copy
import json
import lzma
import math
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import fast_paths
from muon import Optimiser
from score import evaluate, load_heldout


def build(config: dict) -> PreTrainedModel:
    """Create the model with fresh weights; time constants start in `init.time_step` where layers have them."""
    torch.manual_seed(config.get("seed", 0))
    settings = AutoConfig.for_model(config["model_type"], **config["model"])
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    low, high = config.get("init", {}).get("time_step", (None, None))
    if low is not None:
        # The stock initialisation of delta-rule layers forgets within a token; a decay per token between
        # 1 - high and 1 - low lets the layers use their context from the first step on
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                step = torch.exp(torch.empty_like(parameter).uniform_(math.log(low), math.log(high)))
                parameter.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def load_tokens(path: Path) -> Tensor:
    """Read the packed training tokens."""
    with lzma.open(path) as file:
        return torch.from_numpy(np.frombuffer(file.read(), dtype=np.uint16).astype(np.int16))


class Batches:
    """Windows of the token stream, in an order that depends on the step only, so that a run can resume."""

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int):
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.per_epoch = (len(tokens) - length - 1) // length // batch
        if self.per_epoch < 1:
            raise ValueError(f"{len(tokens)} tokens are fewer than one batch of {batch} × {length}")
        self.epoch, self.starts = -1, torch.empty(0)
        self.offsets = torch.arange(length + 1, device=tokens.device)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            shift = int(torch.randint(self.length, (), generator=generator))
            windows = (len(self.tokens) - shift - 1) // self.length
            order = torch.randperm(windows, generator=generator)
            self.starts, self.epoch = (order * self.length + shift).to(self.tokens.device), epoch
        rows = self.starts[index * self.batch : (index + 1) * self.batch]
        window = self.tokens[rows[:, None] + self.offsets].long()
        return window[:, :-1], window[:, 1:]


def schedule(progress: float, step: int, warmup: int, decay: float) -> float:
    """Warm up over `warmup` steps, hold, then fall linearly to zero over the last `decay` of the run."""
    return min(1.0, (step + 1) / warmup, max(0.0, (1 - progress) / decay))


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers one by one: two graphs serve all of them, and the masks stay outside."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            for layer in module:
                layer.compile(dynamic=False)


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the output layer."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def export(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Write an ordinary bfloat16 model folder with its tokenizer."""
    rounded = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config.pad_token_id = model.config.eos_token_id
    rounded.save_pretrained(folder)
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, folder / path.name)


def train(options: argparse.Namespace) -> dict:
    """Run the training described by the options; return the last held-out result."""
    begin = time.monotonic()
    config = json.loads(options.config.read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    model = build(config).train()
    model.to(device)  # pyright: ignore[reportArgumentType]
    plan = config["training"]
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    steps, length, batch = plan["steps"], plan["length"], plan["batch"]
    replaced = fast_paths.install(model) if plan.get("fast_paths", True) and device.type == "cuda" else []
    loss_function = head_loss
    if plan.get("compile", True) and device.type == "cuda":
        compile_layers(model)
        loss_function = torch.compile(head_loss, dynamic=False)
    optimiser = Optimiser(model, plan["rate"], plan["adam_rate"], plan["weight_decay"])

    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer" / "tokenizer.json"))
    heldout = load_heldout(options.heldout or options.data / "heldout", tokenizer)
    batches = Batches(load_tokens(options.data / "train.u16.xz").to(device), length, batch, config.get("seed", 0))
    options.output.mkdir(parents=True, exist_ok=True)
    checkpoint = options.checkpoint or options.output / "checkpoint.pt"
    step, tokens, spent = 0, 0, 0.0
    if options.resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        step, tokens, spent = saved["step"], saved["tokens"], saved["seconds"]
    log = (options.output / "log.jsonl").open("a" if step else "w")

    def record(entry: dict) -> None:
        log.write(json.dumps(entry) + "\n")
        log.flush()
        print(json.dumps(entry), flush=True)

    count = sum(p.numel() for p in model.parameters())
    record({"parameters": count, "replaced": replaced, "device": device.type, "ready": time.monotonic() - begin})

    def mixed() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def save() -> None:
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step, "tokens": tokens}
        torch.save(state | {"seconds": spent + time.monotonic() - start}, checkpoint)
        export(model, options.data / "tokenizer", options.output / "model")

    def measure(limit: int | None) -> dict:
        # Compiling once more for evaluation shapes costs more than it saves
        with torch.compiler.set_stance("force_eager"), mixed():
            return evaluate(model, heldout, length=min(length, 2048), batch=batch, limit=limit)

    start = mark = time.monotonic()
    budget = 60 * options.minutes if options.minutes else math.inf
    losses: list[Tensor] = []
    while step < min(steps, options.stop or steps):
        # The budget counts from the start of the program: what it needs to get ready is part of it
        elapsed = time.monotonic() - begin
        if elapsed > budget:
            break
        progress = step / steps
        if options.fit:
            progress = max(progress, elapsed / budget)
        x, y = batches(step)
        with mixed():
            hidden = model.base_model(input_ids=x, use_cache=False).last_hidden_state
            loss = loss_function(hidden, head.weight, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), plan.get("clip", 1.0))
        scale = schedule(progress, step, plan["warmup"], plan["decay"])
        optimiser.step(scale)
        optimiser.zero_grad()
        losses.append(loss.detach())
        step, tokens = step + 1, tokens + x.numel()
        if step % plan.get("log_every", 50) == 0 or step == steps:
            mean = torch.stack(losses).mean().item()
            now = time.monotonic()
            record(
                {"step": step, "tokens": tokens, "loss": round(mean, 4), "rate": round(scale, 4)}
                | {"norm": round(norm.item(), 3), "tokens_per_s": round(len(losses) * x.numel() / (now - mark))}
                | {"seconds": round(now - begin, 1)}
            )
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} at step {step}")
            losses, mark = [], now
        if step % plan["evaluate_every"] == 0 and step < steps:
            record({"step": step, "tokens": tokens, "bits_per_byte": measure(plan.get("evaluate_tokens"))})
            save()
            mark = time.monotonic()
    result = measure(None)
    record({"step": step, "tokens": tokens, "seconds": round(time.monotonic() - begin, 1), "bits_per_byte": result})
    save()
    log.close()
    return result


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, help="held-out text (default: DATA/heldout)")
    parser.add_argument("--checkpoint", type=Path, help="the resumable state (default: OUTPUT/checkpoint.pt)")
    parser.add_argument("--minutes", type=float, help="stop, evaluate and save after this time")
    parser.add_argument("--fit", action="store_true", help="finish the learning-rate schedule within --minutes")
    parser.add_argument("--stop", type=int, help="stop, evaluate and save after this step")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args(arguments)
    if options.fit and not options.minutes:
        parser.error("--fit needs --minutes")
    return train(options)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main(sys.argv[1:])
