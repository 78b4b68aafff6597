"""Draw the loss curve of a training run.

train.py does it too; this is for logs that were put together from several runs:

python training/plot_log.py out/docs_gdn/log.jsonl src/replayssm/models/docs_gdn/loss.png
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw(log: Path, picture: Path) -> None:
    """Training loss and held-out bits per byte over tokens; an axis is empty where there is nothing yet."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [(e["tokens"] / 1e6, e["loss"]) for e in entries if "loss" in e]
    # The last entry covers all held-out text, the others its first tokens: only like with like in one line
    bits = [(e["tokens"] / 1e6, e["bits_per_byte"]) for e in entries[:-1] if "bits_per_byte" in e]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), dpi=110)
    left.plot([t for t, _ in losses], [value for _, value in losses], color="tab:blue", linewidth=1.2)
    left.set(xlabel="million tokens", ylabel="training loss, nats per token", yscale="log")
    left.set_yticks([1.5, 2, 3, 4, 6], ["1.5", "2", "3", "4", "6"])
    left.minorticks_off()
    right.set(xlabel="million tokens", ylabel="held-out bits per byte")
    if bits:
        for name in bits[0][1]:
            style = {"color": "black", "linewidth": 2} if name == "all" else {"linewidth": 1}
            right.plot([t for t, _ in bits], [b[name] for _, b in bits], marker=".", label=name, **style)
        right.set_ylim(top=1.05 * max(max(b.values()) for _, b in bits) + 0.1)
        right.legend(fontsize=8, ncols=3, loc="upper center")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(options.log, options.picture)


if __name__ == "__main__":
    main()
