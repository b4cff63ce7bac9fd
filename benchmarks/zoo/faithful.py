"""Measures whether a picture shows its prompt: the embedded VLM describes it, and the description is parsed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.zoo import score
from benchmarks.zoo.score import Stated
from mmspec.app import embedded
from mmspec.app.bench.report import Record
from mmspec.app.prompt import PromptChoice
from mmspec.zoo import pictures, scenes
from mmspec.zoo.pictures import Picture

BATCH = 16
ATTRIBUTES = ("size", "texture", "colour", "shape")
FACTS = ("background", "count", *ATTRIBUTES, "relation")
_BACKGROUND = re.compile(r"\ban? (\w+) background")


def on_canvas(picture: Image.Image) -> Image.Image:
    """The picture as the upper left part of a scene; the rest is filled with its emptiest quarter.

    The embedded VLM and its tower expect 32 pixels per cell; other pictures are resized to two cells a side.
    """
    small = picture.convert("RGB")
    if small.size != (pictures.SIDE, pictures.SIDE):
        small = small.resize((pictures.SIDE, pictures.SIDE), Image.Resampling.BICUBIC)
    pixels, half = np.asarray(small), pictures.SIDE // 2
    quarters = [pixels[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    turned = pixels.swapaxes(0, 1)
    rim = np.median(np.concatenate([pixels[:3], pixels[-3:], turned[:3], turned[-3:]]), axis=(0, 1))
    emptiest = min(quarters, key=lambda quarter: float(np.abs(quarter - rim).mean()))
    canvas = np.tile(emptiest, (scenes.SIDE // half, scenes.SIDE // half, 1))
    canvas[: pictures.SIDE, : pictures.SIDE] = pixels
    return Image.fromarray(canvas)


class PictureReader:
    """The embedded VLM, which describes pictures."""

    def __init__(self, device: str = "cpu") -> None:
        from mmspec.app.engine import load

        drafter = next(iter(embedded.drafters(embedded.MODEL)), "suffix")  # before `make zoo` has trained it
        self.engine: Any = load(embedded.MODEL, drafter, device, "float32", 96, 0)

    def describe(self, shown: Sequence[Image.Image]) -> list[str]:
        flow, asked = self.engine.flow(BATCH), PromptChoice(embedded.prompt())
        for number, picture in enumerate(shown):
            flow.add(number, [on_canvas(picture)], asked)
        texts: dict[int, str] = {}
        while flow.busy:
            texts |= {answer.ticket: answer.text for answer in flow.step()}
        return [texts[number] for number in range(len(shown))]

    def score(self, shown: Sequence[Image.Image], wanted: Sequence[Picture]) -> Record:
        """`faithfulness` (share of the prompts' facts that hold), `all_right` (of the pictures), shares by fact, n."""
        right, of, whole = Counter[str](), Counter[str](), 0
        for text, picture in zip(self.describe(shown), wanted, strict=True):
            held = facts(text, picture)
            whole += all(all(some) for some in held.values())
            for fact, some in held.items():
                right[fact] += sum(some)
                of[fact] += len(some)
        return {
            "faithfulness": right.total() / max(1, of.total()),
            "all_right": whole / max(1, len(wanted)),
            "facts": {fact: (right[fact], of[fact]) for fact in FACTS if of[fact]},
            "n": len(wanted),
        }


def facts(text: str, wanted: Picture) -> dict[str, list[bool]]:
    """Which facts of a prompt a description of its picture confirms; objects are matched as well as possible."""
    said = score.stated_things(text)
    background = _BACKGROUND.search(text)
    pairs = max(_pairings(said, len(wanted.things)), key=lambda pairing: _agreement(pairing, wanted))
    holds = {
        "background": [background is not None and background[1] == wanted.background],
        "count": [len(said) == len(wanted.things)],
    }
    for name in ATTRIBUTES:
        holds[name] = [one is not None and getattr(one, name) == getattr(thing, name)
                       for one, thing in zip(pairs, wanted.things, strict=True)]  # fmt: skip
    if wanted.relation:
        holds["relation"] = [_stands(pairs[0], pairs[1], wanted.relation)]
    return holds


def _pairings(said: list[Stated], count: int) -> Sequence[tuple[Stated | None, ...]]:
    padded = [*said, *[None] * max(0, count - len(said))]
    return list(permutations(padded, count))


def _agreement(pairing: Sequence[Stated | None], wanted: Picture) -> int:
    alike = sum(getattr(one, name) == getattr(thing, name) for name in ATTRIBUTES
                for one, thing in zip(pairing, wanted.things, strict=True) if one is not None)  # fmt: skip
    stands = len(pairing) > 1 and wanted.relation is not None and _stands(pairing[0], pairing[1], wanted.relation)
    return 2 * alike + stands


def _stands(first: Stated | None, second: Stated | None, relation: str) -> bool:
    """Whether the stated positions hold in the columns and rows of the scene's grid."""
    if first is None or second is None or first.cell is None or second.cell is None:
        return False
    across, down = first.cell % 3 - second.cell % 3, first.cell // 3 - second.cell // 3
    return {"left of": across < 0, "right of": across > 0, "above": down < 0, "below": down > 0}[relation]
