"""An `eagle` drafter for SmolLM2-135M-Instruct, on the model's own answers about Python's standard library.

    python benchmarks/real_train.py --out runs/smollm2-eagle          # the same command again goes on where it stopped
    python benchmarks/real_train.py --out /tmp/smoke --set steps=2 held_out=2 max_new_tokens=8 --limit 8

The prompts are the documentation strings of its functions, so they depend on Python's version; the order is fixed by a
seed. What `mmspec train` does with them is in docs/drafters.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real import loaded  # noqa: E402

from mmspec.app.train import _values, train  # noqa: E402
from mmspec.train.recipes import RECIPES  # noqa: E402

MODULES = """
    argparse asyncio base64 bisect calendar collections concurrent.futures configparser contextlib copy csv
    datetime decimal difflib email.utils fractions functools glob gzip hashlib heapq html http.client inspect io
    itertools json logging math operator os os.path pathlib pickle pprint queue random re shutil socket sqlite3
    statistics string subprocess tempfile textwrap threading time unittest urllib.parse uuid zipfile
"""
ASKING = (
    "Explain in your own words what `{name}` does. Its documentation says: {text}",
    "Give a short example in Python that uses `{name}`: {text}",
    "Summarize: {text}",
    "When would one use `{name}`? {text}",
)
SEED, LONGEST = 0, 400  # characters of a documentation string


def prompts() -> list[str]:
    """One for each function and class that has a documentation string of its own, in an order that a seed fixes."""
    found: dict[str, str] = {}
    for module in MODULES.split():
        for name, one in sorted(vars(importlib.import_module(module)).items()):
            said = inspect.getdoc(one) if callable(one) and not name.startswith("_") else None
            if said and len(said) > 40:
                found.setdefault(" ".join(said.split())[:LONGEST], f"{module}.{name}")
    asked = [ASKING[n % len(ASKING)].format(name=name, text=text) for n, (text, name) in enumerate(found.items())]
    return [asked[place] for place in np.random.default_rng(SEED).permutation(len(asked))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change values of the recipe")
    parser.add_argument("--limit", type=int, default=800, help="prompts at most")
    args = parser.parse_args()
    recipe = RECIPES["eagle"].with_(
        steps=300, batch=6, lr=1e-3, muon=True, token_weight=1.0, max_new_tokens=96, held_out=24, seed=SEED
    )
    recipe = recipe.with_(**_values("--set", args.set, {f.name: getattr(recipe, f.name) for f in fields(recipe)}))
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "prompts.jsonl"
    if not data.exists():  # a run that goes on keeps its own, whatever Python's version
        data.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts()))
    model, tokenizer = loaded()
    train(model, tokenizer, "eagle", str(data), args.out, recipe, intermediate=768, limit=args.limit)


if __name__ == "__main__":
    main()
