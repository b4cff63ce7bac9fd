"""A drafter of your own in one file: what most often followed the last three tokens in texts that you already have.

python examples/own_drafter.py
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import zoo
from mmspec.config import Options, chosen
from mmspec.protocols import Drafter, SessionView, Target, TargetInfo
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Draft, Prompt
from mmspec.zoo import scenes

ORDER = 3


@dataclass(frozen=True)
class PhraseOptions:
    """What `enable(model, drafter, depth=4)` can say to it."""

    depth: int = 8


@dataclass(frozen=True)
class PhraseDrafter:
    """Drafts a chain of up to `depth` tokens; whatever it proposes, the text stays the model's own."""

    follows: dict[tuple[int, ...], int]  # the last ORDER tokens → the next one
    options: PhraseOptions = PhraseOptions()
    features: tuple[int, ...] = ()  # what it reads of the target: nothing

    @classmethod
    def read(cls, texts: list[str], tokenizer: Any) -> PhraseDrafter:
        seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in texts:
            ids = tokenizer(text).input_ids
            for i in range(ORDER, len(ids)):
                seen[tuple(ids[i - ORDER : i])][ids[i]] += 1
        return cls({phrase: counts.most_common(1)[0][0] for phrase, counts in seen.items()})

    @property
    def nodes(self) -> int:
        """The most nodes of a draft, its root included."""
        return self.options.depth + 1

    def fit(self, target: TargetInfo, given: Options) -> PhraseDrafter:
        """This drafter with the options given to `enable`; any target will do."""
        return replace(self, options=chosen(self.options, given, "PhraseDrafter"))

    def start(self, session: SessionView[None], target: Target, prompt: Prompt) -> None:
        """It remembers nothing of a row."""

    def propose(self, session: SessionView[None], target: Target) -> Draft:
        lines = [[row.tokens[-1], *self._after(row.tokens)] for row in session.rows]  # the root is decided already
        tokens = torch.tensor(lines, device=session.pending.device)  # [B, depth + 1]
        return Draft(tokens, chain(self.nodes, tokens.device).expand(len(lines)))  # no distribution: point masses

    def _after(self, tokens: list[int]) -> list[int]:
        text = tokens[-ORDER:]
        for _ in range(self.options.depth):
            text.append(self.follows.get(tuple(text[-ORDER:]), NO_TOKEN))  # a hole proposes nothing
        return text[-self.options.depth :]


def described(scene: scenes.Scene) -> str:
    """A text such as you may have of pictures like yours; here they are drawn ones."""
    rows, columns = ("at the top{}", "{}", "at the bottom{}"), (" left", "", " right")
    places = [row.format(column) for row in rows for column in columns]
    places[3:6] = "on the left", "in the centre", "on the right"
    things = [f"a {t.size} {t.texture} {t.colour} {t.shape} {places[t.cell]}" for t in scene.things]
    number = ("one object", "two objects", "three objects", "four objects", "five objects", "six objects")
    told = f"The picture shows {number[len(things) - 1]} on a {scene.background} background: {', '.join(things)}."
    first, *_, last = [f"the {t.colour} {t.shape}" for t in (scene.things[0], *scene.things)]
    related = scenes.relations(scene.things[0], scene.things[-1])
    return f"{told} {first.capitalize()} is {related[0]} {last}." if related else told


if __name__ == "__main__":
    logging.disable_progress_bar()  # of loading weights
    processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
    model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32")
    texts = [described(scenes.draw(np.random.default_rng(i))) for i in range(500)]

    picture = Image.open(zoo.samples() / "scene-01.png")
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Describe this image."}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip

    drafter: Drafter[None] = PhraseDrafter.read(texts, processor.tokenizer)  # a type checker holds it to the protocol
    mmspec.enable(model, drafter=drafter)
    print(mmspec.verify(model, inputs))  # the same tokens as stock generate?
    print(mmspec.stats(model))
