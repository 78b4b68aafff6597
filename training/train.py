"""Train a small language model of any causal architecture of transformers, described by a configuration file.

python training/train.py --architecture gdn --data out/data --out out/docs_gdn
python training/train.py --config my_model.json --data out/data --out out/my_model --seconds 280
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
from plot_log import draw
from score import evaluate, load_heldout

HERE = Path(__file__).parent
ARCHITECTURES = {name: HERE / f"docs_{name}.json" for name in ("gdn", "mamba2", "kda")}


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


class Pace:
    """How far a run is, from 0 to 1: by its steps or, with a budget of seconds, by the time of day.

    The budget counts from `begin` and includes what comes after the last step. The time before `start` (loading, the
    first step, which compiles) is part of it, but the learning rate does not fall in it.

    Attributes:
        ending: seconds to keep for the final measurement and for saving.
    """

    def __init__(self, begin: float, seconds: float | None, steps: int, done: float):
        self.begin, self.seconds, self.steps, self.done = begin, seconds, steps, done
        self.ending = 20.0
        self.start: float | None = None
        self.reached = done

    def __call__(self, step: int) -> float:
        """Progress before step number `step`; it never falls."""
        if self.seconds is None:
            return step / self.steps
        now = time.monotonic()
        span = self.begin + self.seconds - self.ending - (self.start or self.begin)
        share = (now - (self.start or now)) / span if span > 0 else 1.0
        self.reached = max(self.reached, min(1.0, self.done + (1 - self.done) * share))
        return self.reached


def train(options: argparse.Namespace) -> dict:
    """Run the training described by the options; return the last held-out result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    config = json.loads((options.config or ARCHITECTURES[options.architecture]).read_text())
    model = build(config).train()
    model.to(device)  # pyright: ignore[reportArgumentType]
    with fast_paths.installed(model) as replaced:
        return Run(options, config, model, replaced).finish()


class Run:
    """One training run, with its model, its text, its log and its state."""

    def __init__(self, options: argparse.Namespace, config: dict, model: PreTrainedModel, replaced: list[str]):
        device = model.device
        self.options, self.model, self.device = options, model, device
        self.plan = plan = config["training"]
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self.head, self.loss_function = head, head_loss
        if plan.get("compile", device.type == "cuda"):
            compile_layers(model)
            self.loss_function = torch.compile(head_loss, dynamic=False)
        self.optimiser = Optimiser(model, plan["rate"], plan["adam_rate"], plan["weight_decay"])
        self.tokenizer = options.data / "tokenizer"
        tokenizer = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        self.heldout = load_heldout(options.heldout or options.data / "heldout", tokenizer)
        text = load_tokens(options.data / "train.u16.xz").to(device)
        self.batches = Batches(text, plan["length"], plan["batch"], config.get("seed", 0))
        options.out.mkdir(parents=True, exist_ok=True)
        self.checkpoint = options.checkpoint or options.out / "checkpoint.pt"
        self.step, self.tokens, done = 0, 0, 0.0
        if options.resume and self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location=device)
            model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step, self.tokens, done = saved["step"], saved["tokens"], saved["progress"]
        self.pace = Pace(options.begin, options.seconds, plan["steps"], done)
        self.log = options.out / "log.jsonl"
        if not self.step:
            self.log.write_text("")
        count = sum(p.numel() for p in model.parameters())
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self.record({"parameters": count, "replaced": replaced, "device": name, "torch": torch.__version__})

    def record(self, entry: dict) -> None:
        """Add a line to the log."""
        line = json.dumps(entry | {"seconds": round(time.monotonic() - self.options.begin, 1)})
        with self.log.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def mixed(self) -> torch.autocast:
        """Matrix products in bfloat16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def advance(self, scale: float) -> tuple[Tensor, Tensor]:
        """Train one step; return the loss and the gradient's norm."""
        x, y = self.batches(self.step)
        with self.mixed():
            hidden = self.model.base_model(input_ids=x, use_cache=False).last_hidden_state
            loss = self.loss_function(hidden, self.head.weight, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.get("clip", 1.0))
        self.optimiser.step(scale)
        self.optimiser.zero_grad()
        self.step, self.tokens = self.step + 1, self.tokens + x.numel()
        return loss.detach(), norm

    def measure(self, limit: int | None) -> None:
        """Log the bits per byte of the first `limit` tokens of each source, and save."""
        begin = time.monotonic()
        # Compiling once more for evaluation shapes costs more than it saves
        with torch.compiler.set_stance("force_eager"), self.mixed():
            window = min(self.plan["length"], 2048)
            self.result = evaluate(self.model, self.heldout, length=window, batch=16, limit=limit)
        whole = sum(len(tokens) for tokens, _ in self.heldout.values())
        share = sum(min(len(tokens), limit or len(tokens)) for tokens, _ in self.heldout.values()) / whole
        spent = time.monotonic() - begin
        self.record({"step": self.step, "tokens": self.tokens, "bits_per_byte": self.result})
        self.save()
        self.pace.ending = 1.3 * (spent / share + time.monotonic() - begin - spent) + 2

    def save(self) -> None:
        """Write the model folder, the resumable state and the picture."""
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"step": self.step, "tokens": self.tokens, "progress": self.pace(self.step)}
        torch.save(state, self.checkpoint)
        export(self.model, self.tokenizer, self.options.out / "model")
        draw(self.log, self.options.out / "loss.png")

    def finish(self) -> dict:
        """Train to the end; return the final held-out result."""
        plan, every = self.plan, self.plan["log_every"]
        losses: list[Tensor] = []
        mark, measured = time.monotonic(), math.floor(self.pace(self.step) * plan["evaluations"])
        while (progress := self.pace(self.step)) < 1 and self.step != self.options.stop:
            if (due := math.floor(progress * plan["evaluations"])) > measured:
                self.measure(plan["evaluate_tokens"])
                mark, measured, losses = time.monotonic(), due, []
            scale = schedule(progress, self.step, plan["warmup"], plan["decay"])
            loss, norm = self.advance(scale)
            losses.append(loss)
            if self.pace.start is None:
                loss.item()  # waits for the device
                self.pace.start = mark = time.monotonic()
                self.record({"step": self.step, "tokens": self.tokens, "ready": True})
                losses = []
            elif self.step % every == 0:
                mean = torch.stack(losses).mean().item()
                now = time.monotonic()
                speed = len(losses) * plan["length"] * plan["batch"] / (now - mark)
                self.record(
                    {"step": self.step, "tokens": self.tokens, "loss": round(mean, 4), "rate": round(scale, 4)}
                    | {"norm": round(norm.item(), 3), "tokens_per_s": round(speed)}
                )
                if not math.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} at step {self.step}")
                losses, mark = [], now
        self.measure(None)
        return self.result


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--architecture", choices=ARCHITECTURES, help="one of the shipped models")
    which.add_argument("--config", type=Path, help="a configuration of your own")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, help="held-out text (default: DATA/heldout)")
    parser.add_argument("--checkpoint", type=Path, help="the resumable state (default: OUT/checkpoint.pt)")
    parser.add_argument("--seconds", type=float, help="for everything, compiling too, instead of a number of steps")
    parser.add_argument("--stop", type=int, help="stop, measure and save after this step")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args(arguments)
    options.begin = time.monotonic()
    return train(options)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main(sys.argv[1:])
