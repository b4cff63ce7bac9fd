"""Measures what `compile=True` gains and costs for the prompts of a model with recurrent layers, on a CPU.

    python -m benchmarks.compiled_prompts --out benchmarks/results/compiled-prompts

A hybrid of Qwen3.5's classes, with the layers of its smallest model and random weights, reads prompts of text up to the
first token: by stock `generate`, enabled without `compile`, and with it, in turn. Nothing that was compiled earlier is
used.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # read when torch is imported

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import mmspec
from benchmarks.page import command, heading, page, save
from mmspec.app.provenance import provenance

LENGTHS = (128, 512, 1024)
SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "vocab_size": 4096, "eos_token_id": None,
}  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measured(model: Qwen3_5ForCausalLM, length: int, turns: int) -> dict[str, float]:
    """The median times of one length, and what its first captured call took more."""
    ids = torch.randint(5, 4000, (1, length), generator=torch.Generator().manual_seed(length))

    def call() -> None:
        model.generate(ids, max_new_tokens=1, do_sample=False)

    call()
    with mmspec.enable(model, "plain", compile=True):
        usual = seconds(call)
        first = seconds(call)
    taken: dict[str, list[float]] = {"stock's ms": [], "uncompiled ms": [], "compiled ms": []}
    for _ in range(turns):
        taken["stock's ms"].append(1e3 * seconds(call))
        for name, compiled in (("uncompiled ms", False), ("compiled ms", True)):
            with mmspec.enable(model, "plain", compile=compiled):
                taken[name].append(1e3 * seconds(call))
    return {name: statistics.median(times) for name, times in taken.items()} | {"compiling s": first - usual}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, num_hidden_layers=args.layers)).eval()
    medians = {length: measured(model, length, args.turns) for length in args.lengths}
    facts = provenance(torch.device("cpu"), torch.float32) | {"argv": command(), "turns": args.turns}
    heads = list(next(iter(medians.values())))
    lines = heading(["tokens", *heads], "--:")
    lines += [f"| {length} | " + " | ".join(f"{row[h]:.0f}" for h in heads) + " |" for length, row in medians.items()]
    lines += [
        "", f"{args.layers} layers, three of four with the gated delta rule. Time to the first token, medians;",
        "compiling: what the call that captures a prompt of this length takes more, once, nothing being cached.",
    ]  # fmt: skip
    save(args.out, facts, {"medians": medians}, page("Compiled prompts of a hybrid", facts, lines))


if __name__ == "__main__":
    main()
