"""Trains an `eagle` or `block` drafter for SmolLM2-135M-Instruct on the model's own answers.

    python -m benchmarks.real_train --out runs/smollm2-eagle          # the same command resumes
    python -m benchmarks.real_train --method block --out runs/smollm2-block --answers runs/smollm2-eagle
    python -m benchmarks.real_train --out /tmp/smoke --set steps=2 held_out=2 max_new_tokens=8 --limit 8

The prompts come from `real_prompts.py`; docs/drafters.md describes how `mmspec train` uses them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.real import loaded
from benchmarks.real_prompts import lessons
from mmspec.app.devices import find_device
from mmspec.app.train import _values, train
from mmspec.train.recipes import RECIPES

SEED = 0
MASK = "<file_sep>"  # mask token for the positions that a block predicts; it occurs in no text
SHARED = {"steps": 900, "batch": 12, "bf16": True, "clip": 1.0, "token_weight": 1.0, "muon": True,
    "max_new_tokens": 112, "writing": 48, "held_out": 24, "seed": SEED}  # fmt: skip
OF = {  # method: its own values of the recipe, and its shape; four rows take the target about the time of one
    "eagle": (
        {"lr": 3e-3, "feature_weight": 0.5, "unroll": 4, "vocabulary": 8192},
        {"depth": 3, "width": 1, "size": 4, "tree": "chain"},
    ),
    "block": (
        {"lr": 6e-3, "feature_weight": 0.0, "unroll": 4, "step_decay": 0.8, "anchors": 48},
        {"depth": 3, "width": 1, "size": 4, "tree": "chain", "layers": 2, "features": (10, 20, -1), "block": 4,
         "anchored": True, "markov_rank": 64, "draft_vocab": 8192},
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--method", choices=sorted(OF), default="eagle")
    parser.add_argument(
        "--answers", type=Path, help="folder of another method's run, whose prompts and answers are reused"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="override values of the recipe")
    parser.add_argument("--limit", type=int, default=1600, help="maximum number of prompts")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, where the model is in bfloat16 (%(default)s)")
    args = parser.parse_args()
    own, shape = OF[args.method]
    recipe = RECIPES[args.method].with_(**SHARED, **own)
    recipe = recipe.with_(**_values("--set", args.set, {f.name: getattr(recipe, f.name) for f in fields(recipe)}))
    args.out.mkdir(parents=True, exist_ok=True)
    data = (args.answers or args.out) / "prompts.jsonl"
    if not data.exists():  # a resumed run keeps its prompts, whatever Python's version
        data.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in lessons(SEED)))
    device = find_device(args.device)
    model, tokenizer = loaded()
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if args.method == "block":
        shape = {**shape, "mask_token": tokenizer.convert_tokens_to_ids(MASK)}
    train(
        model, tokenizer, args.method, str(data), args.out, recipe, shape={"intermediate": 1024, **shape},
        limit=args.limit, answers=args.answers, keep=4.0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
