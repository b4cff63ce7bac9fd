"""Measures the time to the first token of a second question about a picture, at the shape of a published model.

    python -m benchmarks.second_question --out benchmarks/results/second-question

The model has random weights, so only times and tokens are compared. Its processor would cut a picture into tiles; here
the tiles are noise. Each method answers two questions about every picture and starts with an empty prefix cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import mmspec
from benchmarks.page import command, heading, page, save
from benchmarks.suites.shapes_models import MODELS, REAL, TOY, Chat
from mmspec.app.provenance import provenance

NAME = "smolvlm-500m"
METHODS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "whole prompts": {},
    "prefix_cache": {"prefix_cache": "2GB"},
}
QUESTION = 24  # tokens of a tile


def asked(shape: Chat, size: str, tiles: int, seed: int, model: Any) -> list[dict[str, Any]]:
    """Two questions about one picture with this many tiles."""
    torch.manual_seed(seed)
    pictures, each = shape.picture(shape.vision[size], shape.side[size], tiles)
    pixels = pictures["pixel_values"].transpose(0, 1)
    image, words = model.config.image_token_id, shape.text[size]["vocab_size"] - 80
    begin = torch.cat([torch.randint(3, words, (1, 4)), torch.full((1, tiles * each), image)], 1)
    both = [torch.cat([begin, torch.randint(3, words, (1, QUESTION))], 1) for _ in range(2)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels} for ids in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--tiles", type=int, default=5, help="tiles of a picture; SmolVLM's processor makes 5 to 17")
    parser.add_argument("--toy", action="store_true", help="a tiny shape of the same architecture")
    parser.add_argument("--out", type=Path, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    size, shape = TOY if args.toy else REAL, MODELS[NAME]
    torch.manual_seed(0)
    parts: dict[str, Any] = {**shape.parts(size, torch.float32)}
    model = parts["target"].eval()
    took: dict[str, list[float]] = {name: [] for name in METHODS}
    said: dict[str, list[list[int]]] = {name: [] for name in METHODS}
    with torch.inference_mode():
        for picture in range(-1, args.pictures):  # the first one is a warm-up
            questions = asked(shape, size, args.tiles, picture + 1, model)
            for name, how in METHODS.items():
                mmspec.disable(model)
                if how is not None:
                    mmspec.enable(model, parts["eagle"], **how)
                for inputs in questions:
                    began = time.perf_counter()
                    out = model.generate(**inputs, max_new_tokens=1, do_sample=False)
                    if picture >= 0:
                        took[name].append(time.perf_counter() - began)
                        said[name].append(out[0, -1:].tolist())
    mmspec.disable(model)
    facts = provenance(model.device, model.dtype) | {"argv": command(), "model": f"{NAME}, random weights"}
    facts |= {"tiles": args.tiles, "prompt_tokens": questions[0]["input_ids"].shape[1]}
    found: list[dict[str, Any]] = []
    for name in METHODS:
        first, second = took[name][::2], took[name][1::2]
        shares = [b / a for a, b in zip(first, second, strict=True)]
        low, mid, high = statistics.quantiles(shares, n=4, method="inclusive")
        found.append({
            "method": name, "first_ms": 1e3 * statistics.median(first), "second_ms": 1e3 * statistics.median(second),
            "share": {"median": mid, "p25": low, "p75": high}, "identical": said[name] == said["stock"],
            "n": len(shares),
        })  # fmt: skip
    lines = heading(["method", "first ms", "second ms", "second/first", "identical", "n"])
    for r in found:
        q = r["share"]
        lines.append(
            f"| {r['method']} | {r['first_ms']:.0f} | {r['second_ms']:.0f} | {q['median']:.1%} ({q['p25']:.1%}-"
            f"{q['p75']:.1%}) | {'yes' if r['identical'] else 'no'} | {r['n']} |"
        )
    lines += ["", "Milliseconds until a call for one token returns, medians over pictures."]
    save(args.out, facts, {"records": found}, page("A second question about a picture", facts, lines))


if __name__ == "__main__":
    main()
