"""Families and drafters on a device: identical to stock in float32, how far they agree in bfloat16, and the logit gaps.

`python tests/support/on_device.py --device cuda --json FILE`; the models and prompts are those of the tests.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_drafters
import tiny_vlms
import torch
from torch import nn

import mmspec
from mmspec.app.provenance import provenance

TOKENS = 24
KINDS = ("image first", "ragged")
MADE = {  # those that live where the target does: name in hostile_drafters.DRAFTERS, options of `enable`
    "ngram": ("ngram", {}),
    "eagle chain": ("eagle chain", {}),
    "eagle tree": ("eagle tree", {}),
    "eagle tree compiled": ("eagle tree", {"compile": True}),
    "vispec": ("vispec", {}),
    "msd": ("msd", {}),
}


def main() -> int:
    """0 if all is identical in float32, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", choices=tiny_vlms.FAMILIES, default=list(tiny_vlms.FAMILIES))
    parser.add_argument("--drafters", nargs="+", choices=MADE, default=list(MADE))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    out: dict[str, Any] = {"provenance": provenance(device, torch.float32), "records": []}
    for record in compared(device, args.families, args.drafters):
        out["records"].append(record)
        out["summary"] = summary(out["records"])
        args.json.write_text(json.dumps(out, indent=1))
    print(json.dumps(out["summary"], indent=1))
    return 0 if out["summary"]["float32"]["identical"] == out["summary"]["float32"]["compared"] else 1


def compared(device: torch.device, families: list[str], names: list[str]) -> Iterator[dict[str, Any]]:
    """A record for each family, dtype, drafter and kind of prompt; what raises is one too."""
    for family in families:
        for dtype in (torch.float32, torch.bfloat16):
            model = copy.deepcopy(tiny_vlms.model(family)).to(device, dtype)
            for name in names:
                for kind in KINDS:
                    record = {"family": family, "dtype": str(dtype)[6:], "drafter": name, "kind": kind}
                    try:
                        yield record | verified(model, name, family, kind)
                    except Exception as error:  # the others go on
                        yield record | {"identical": False, "error": f"{type(error).__name__}: {error}"[:400]}


def verified(model: Any, name: str, family: str, kind: str) -> dict[str, Any]:
    """What `mmspec.verify` says."""
    method, options = MADE[name]
    drafter = hostile_drafters.DRAFTERS[method](tiny_vlms.model(family), hostile_drafters.Oracle({}))
    if isinstance(drafter, nn.Module):
        drafter = drafter.to(model.device, model.dtype)
    inputs = {
        key: t.to(model.device, model.dtype if t.is_floating_point() else None)
        for key, t in tiny_vlms.prompt(family, kind).items()
    }
    with mmspec.enable(model, drafter, **options):
        found = mmspec.verify(model, inputs, TOKENS)
    return {
        "identical": found.identical,
        "first_difference": found.first_difference,
        "gap": found.gap,
        "tokens_per_target_call": found.tokens_per_target_call,
    }


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """By dtype: how many agree, what raised, and the widest gap between the two best logits where they do not agree."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        mine = [r for r in records if r["dtype"] == dtype]
        gaps = [r["gap"] for r in mine if r.get("gap") is not None]
        found[dtype] = {
            "compared": len(mine),
            "identical": sum(r["identical"] for r in mine),
            "raised": sum("error" in r for r in mine),
            "widest gap": max(gaps, default=None),
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
