"""Measure a model's multi-token-prediction head: how often its likeliest token is the model's, by source and depth.

python training/score_mtp.py --model src/replayssm/models/docs_gdn --heldout src/replayssm/models/heldout
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from replayssm import models
from replayssm.engine.mtp_head import MtpHead
from score import load_heldout
from train_mtp import agreement, rates, windows


def main(arguments: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT, help="a shipped name or a folder, with a head")
    parser.add_argument("--heldout", type=Path, default=Path(models.__file__).parent / "heldout")
    parser.add_argument("--depths", type=int, default=3, help="uses of the head, one on top of the other")
    parser.add_argument("--length", type=int, default=1024, help="starts of drafts in a window")
    parser.add_argument("--tokens", type=int, default=65536, help="of each source")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args(arguments)
    model, tokenizer = models.load(options.model, torch.float32)
    head, found, parts = MtpHead.load(model), {}, []
    for name, (tokens, _) in load_heldout(options.heldout, tokenizer).items():
        text = windows(tokens, options.length + options.depths, options.tokens)
        parts.append(agreement(model, head, text, options.depths, options.batch))
        found[name] = rates(parts[-1])
        print(json.dumps({name: found[name]}), flush=True)
    found["all"] = rates(torch.cat(parts, 1))
    print(json.dumps({"all": found["all"]}), flush=True)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
