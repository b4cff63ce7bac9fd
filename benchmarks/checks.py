"""Measures the overhead of the checks that a call makes before its first token.

    python -m benchmarks.checks --out benchmarks/results/checks

The times are processor times, in turn, of the check whether a call can be accelerated (`obstacle`, which reads the
model's version), of reading that version, and of a call for its first token, on the embedded models and a deep one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import mmspec
from benchmarks.page import command, heading, page, save
from benchmarks.zoo.vlm import ZooVlm
from mmspec import zoo
from mmspec.app.provenance import provenance
from mmspec.compile import version
from mmspec.pipelines.families import decoder_only
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle

DEEP = "qwen2.5-vl-7b's modules, narrow"  # as many tokens as the published model has


def embedded(name: str) -> ZooVlm:
    model: ZooVlm = AutoModelForImageTextToText.from_pretrained(zoo.path(name), dtype="float32").eval()
    return model


def deep() -> Qwen2_5_VLForConditionalGeneration:
    """A model with the layers of Qwen2.5-VL-7B, 28 and 32 in its vision tower, but of small width."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tower = {"depth": 32, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    text = {**sizes, **ends, "num_hidden_layers": 28, "vocab_size": 512, "rope_parameters": rope}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower)).eval()


def timed(call: Callable[[], object]) -> float:
    """Processor time of a call in this thread, in milliseconds."""
    began = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - began)


def measured(model: ZooVlm | Qwen2_5_VLForConditionalGeneration, turns: int) -> dict[str, float]:
    """The median times for one model."""
    ids = torch.arange(5, 37)[None]
    taken: dict[str, list[float]] = {
        name: [] for name in ("checks", "version again", "version anew", "first token", "stock's")
    }
    real = decoder_only.obstacle

    def checked(model: GenerativeModel, call: Call, patch: Patch) -> Obstacle | None:
        began = time.thread_time()
        try:
            return real(model, call, patch)
        finally:
            taken["checks"].append(1e3 * (time.thread_time() - began))
            taken["version again"].append(timed(version._SEEN[model].same_structure))

    def call() -> None:
        model.generate(input_ids=ids, max_new_tokens=1, do_sample=False)

    for _ in range(3):
        call()
    decoder_only.obstacle = checked  # type: ignore[assignment]
    try:
        for _ in range(turns):
            mmspec.disable(model)
            taken["stock's"].append(timed(call))
            mmspec.enable(model, "suffix")
            call()
            call()
            for name in ("checks", "version again"):
                del taken[name][-2:]  # the model has just changed
            taken["first token"].append(timed(call))
            taken["version anew"].append(timed(lambda: version._version(model)))
    finally:
        decoder_only.obstacle = real
        mmspec.disable(model)
    return {"modules": len(list(model.modules())), **{name: statistics.median(ms) for name, ms in taken.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", type=Path, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: partial(embedded, name) for name in ("scenes-video", "scenes-hybrid")} | {DEEP: deep}
    medians = {name: measured(make(), args.turns) for name, make in models.items()}
    facts = provenance(torch.device("cpu"), torch.float32) | {"argv": command(), "turns": args.turns}
    heads = list(next(iter(medians.values())))
    lines = heading(["model", *heads])
    for name, row in medians.items():
        lines.append(f"| {name} | {row['modules']} | " + " | ".join(f"{row[h]:.2f}" for h in heads[1:]) + " |")
    lines += [
        "", "Milliseconds of one thread, medians, of a prompt of 32 tokens of text. Checks: whether the call may",
        "be accelerated, with the version of a model that did not change. Version again: that part, at once repeated,",
        "with all that it reads in the caches of the core. Version anew: read as after a change.",
    ]  # fmt: skip
    text = page("What a call looks at before its first token", facts, lines)
    save(args.out, facts, {"milliseconds": medians}, text)


if __name__ == "__main__":
    main()
