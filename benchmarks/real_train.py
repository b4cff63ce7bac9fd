"""An `eagle` drafter for SmolLM2-135M-Instruct, on the model's own answers to questions and texts.

    python benchmarks/real_train.py --out runs/smollm2-eagle          # the same command again goes on where it stopped
    python benchmarks/real_train.py --out /tmp/smoke --set steps=2 held_out=2 max_new_tokens=8 --limit 8

The prompts are those of `real_lessons.py`. What `mmspec train` does with them is in docs/drafters.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real import loaded  # noqa: E402
from real_lessons import lessons  # noqa: E402

from mmspec.app.train import _values, train  # noqa: E402
from mmspec.train.recipes import RECIPES  # noqa: E402

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change values of the recipe")
    parser.add_argument("--limit", type=int, default=1600, help="prompts at most")
    args = parser.parse_args()
    recipe = RECIPES["eagle"].with_(
        steps=900, batch=12, bf16=True, lr=3e-3, muon=True, feature_weight=0.5, token_weight=1.0, clip=1.0, unroll=4,
        vocabulary=8192, max_new_tokens=112,
        writing=48, held_out=24, seed=SEED,
    )  # fmt: skip
    recipe = recipe.with_(**_values("--set", args.set, {f.name: getattr(recipe, f.name) for f in fields(recipe)}))
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "prompts.jsonl"
    if not data.exists():  # a run that goes on keeps its own, whatever Python's version
        data.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in lessons(SEED)))
    model, tokenizer = loaded()
    chain = {"depth": 3, "width": 1, "size": 4, "tree": "chain"}  # four rows take about the time of one
    train(
        model, tokenizer, "eagle", str(data), args.out, recipe, intermediate=1024, shape=chain, limit=args.limit,
        keep=4.0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
