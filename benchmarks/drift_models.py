"""`replayssm drift` for several models side by side on one GPU, and one picture of all of them.

    python benchmarks/drift_models.py docs_gdn docs_mamba2 docs_kda --out benchmarks/results --seconds 240

First some short runs, a few policies each and all at once, compile what the long ones need, since compiling takes
longer than reading 131,072 tokens. Policies whose short run fails are left out, and so is a model that is not there;
what is not done in time is stopped.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path

from replayssm import models
from replayssm.checks import ReplayError
from replayssm.drift import policies

GROUPS = 4
"""Short runs for each model."""
WARM_TOKENS = 1024
COMMAND = "import typer; from replayssm.cli.drift import drift; typer.run(drift)"


def start(model: str, names: list[str], options: list[str], log: Path) -> subprocess.Popen[bytes]:
    """One run of the command in a process of its own, without the other commands and what they import."""
    command = [sys.executable, "-c", COMMAND, model, "--policies", ",".join(names), *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def finish(running: dict[str, tuple[subprocess.Popen[bytes], Path]], deadline: float) -> list[str]:
    """Wait for runs, showing where they are; the names of those that succeeded."""
    done = []
    while running:
        time.sleep(1)
        late = time.time() > deadline
        for name, (process, log) in list(running.items()):
            if process.poll() is None and not late:
                continue
            process.kill()
            del running[name]
            print(f"--- {name}: {'stopped' if late else f'exit {process.returncode}'}", flush=True)
            if process.returncode == 0:
                done.append(name)
            else:
                print(log.read_text(errors="replace")[-3000:], flush=True)
        if int(time.time()) % 10 == 0:
            last = {
                name: log.read_text(errors="replace").strip().rpartition("\n")[2] for name, (_, log) in running.items()
            }
            print(f"{deadline - time.time():.0f} s left:", {name: line[:60] for name, line in last.items()}, flush=True)
    return done


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and pictures")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--policies", default=policies.DEFAULT)
    parser.add_argument("--commit", default="", help="what rows say of the commit, outside of a checkout")
    parser.add_argument("--seconds", type=float, default=240, help="for everything")
    asked = parser.parse_args()
    deadline = time.time() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    names = [policy.name for policy in policies.parse(asked.policies)]
    found = [model for model in asked.models if exists(model)]
    common = ["--device", asked.device, "--batch", str(asked.batch), "--window", str(asked.window)]
    short = {}
    for model in found:
        for part in range(GROUPS):
            log = asked.out / f"warm-{Path(model).name}-{part}.log"
            options = [*common, "--tokens", str(min(WARM_TOKENS, asked.tokens))]
            short[f"{model} {part}"] = start(model, names[part::GROUPS], options, log), log
    fit = finish(short, time.time() + asked.seconds / 2)
    long = {}
    stamp = f"{asked.device}-{datetime.date.today().isoformat()}"
    for model in found:
        rows = asked.out / f"drift-{Path(model).name}-{stamp}.jsonl"
        log = rows.with_suffix(".log")
        options = [*common, "--tokens", str(asked.tokens), "--out", str(rows), "--plot", str(rows.with_suffix(".png"))]
        options += ["--commit", asked.commit]
        chosen = [name for i, name in enumerate(names) if f"{model} {i % GROUPS}" in fit]
        long[str(rows)] = start(model, chosen, options, log), log
    rows = sorted(finish(long, deadline))
    for each in rows:
        print(Path(each).with_suffix(".log").read_text(errors="replace"), flush=True)
    if rows:
        from replayssm.drift.plot import draw
        from replayssm.drift.rows import read

        draw(read(map(Path, rows)), asked.out / f"drift-{stamp}.png")
    sys.exit(0 if len(rows) == len(asked.models) else 1)


def exists(model: str) -> bool:
    """Whether there is such a model; says so if not."""
    try:
        models.resolve(model)
    except ReplayError as error:
        print(f"left out: {error}", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
