"""Counts the bytes of matrices that a round reads: the target's once, the drafter's and the head's in each pass.

python -m benchmarks.draft_bytes --out benchmarks/results/draft-bytes.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

import mmspec
from benchmarks.page import command
from benchmarks.suites.shapes_models import MODELS, REAL
from mmspec import zoo
from mmspec.app.provenance import provenance

EMBEDDED = {  # target, drafter (None: its own head), passes of a round on short and on long answers
    "eagle": ("scenes-video", "scenes-video-eagle", (14.2, 9.0)),  # tokens drafted in round-video*.json
    "block": ("scenes-video", "scenes-video-block", (1.0, 1.0)),
    "mtp": ("scenes-hybrid", None, (8.0, 8.0)),
}
ROWS = 32768  # of the head, with draft_vocab
SMOLVLM = "smolvlm-500m"


def matrices(*modules: nn.Module) -> int:
    """The bytes of all matrices that multiply rows: a table that only looks rows up is not read whole."""
    linears = {id(m.weight): m.weight for each in modules for m in each.modules() if isinstance(m, nn.Linear)}
    return sum(weight.numel() * weight.element_size() for weight in linears.values())


def row(target: int, a_pass: int, passes: tuple[float, ...]) -> dict[str, Any]:
    """`steps`: bytes of a round in those of a plain step."""
    steps = [round(1 + count * a_pass / target, 2) for count in passes]
    return {"target_mb": target / 1e6, "pass_mb": a_pass / 1e6, "passes": passes, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="writes this .json file")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name, (target, drafter, passes) in EMBEDDED.items():
        model = AutoModelForImageTextToText.from_pretrained(zoo.path(target), dtype="float32")
        head = model.get_output_embeddings()
        handle = mmspec.enable(model, None if drafter is None else zoo.path(drafter))
        own = handle.drafter.heads if drafter is None else handle.drafter
        found[f"{name} on {target}"] = row(matrices(model.get_decoder(), head), matrices(own, head), passes)
    with torch.device("meta"):
        parts = MODELS[SMOLVLM].parts(REAL, torch.bfloat16)
    large: Any = parts["target"]
    head = large.get_output_embeddings().weight
    whole = matrices(large.get_decoder(), large.get_output_embeddings())
    for rows in (len(head), ROWS):
        a_pass = matrices(parts["eagle"]) + rows * head.shape[1] * head.element_size()
        found[f"eagle on {SMOLVLM}, {rows} rows"] = row(whole, a_pass, (8.0,))
    facts = provenance(torch.device("cpu"), torch.float32) | {"argv": command()}
    text = json.dumps({"provenance": facts, "rounds": found}, indent=0) + "\n"
    if args.out:
        args.out.write_text(text)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
