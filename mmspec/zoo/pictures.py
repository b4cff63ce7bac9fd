"""Generator of small pictures with prompts, the only kind of prompt that the embedded image model was trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from mmspec.zoo import scenes
from mmspec.zoo.scenes import BACKGROUNDS, CELL, Scene, Thing

SIDE = 2 * CELL  # pixels: the upper left four cells of a scene
CELLS = (0, 1, 3, 4)  # these cells, in the scene's own count
GRAINY = 0.3  # share of pictures on a grainy background: its codes are as hard to predict as those of photographs
NEIGHBOURS = {  # relation: pairs of cells (first, second) with this relation
    "left of": ((0, 1), (3, 4)),
    "right of": ((1, 0), (4, 3)),
    "above": ((0, 3), (1, 4)),
    "below": ((3, 0), (4, 1)),
}


@dataclass(frozen=True)
class Picture:
    """A scene whose objects are all in CELLS, in the order in which the prompt names them."""

    background: str
    things: tuple[Thing, ...]
    relation: str | None  # of the first thing towards the second
    grain: int


def draw(rng: np.random.Generator) -> Picture:
    """A random picture, determined by the state of `rng`."""
    relation = str(rng.choice(list(NEIGHBOURS))) if rng.random() < 0.65 else None
    cells: Sequence[int] = (int(rng.choice(CELLS)),)
    if relation:
        pairs = NEIGHBOURS[relation]
        cells = pairs[int(rng.integers(len(pairs)))]
    things = tuple(scenes.draw_thing(rng, cell) for cell in cells)
    background = "grainy" if rng.random() < GRAINY else str(rng.choice([b for b in BACKGROUNDS if b != "grainy"]))
    return Picture(background, things, relation, int(rng.integers(2**31)))


def render(picture: Picture) -> Image.Image:
    """The picture as SIDE x SIDE RGB pixels."""
    things = tuple(sorted(picture.things, key=lambda thing: thing.cell))
    return scenes.render(Scene(picture.background, things, picture.grain)).crop((0, 0, SIDE, SIDE))


def caption(picture: Picture, rng: np.random.Generator | None = None) -> str:
    """The prompt of a picture; with `rng`, sizes and the background are sometimes left out."""

    def mentioned(chance: float = 0.75) -> bool:
        return rng is None or rng.random() < chance

    def named(thing: Thing) -> str:
        texture = "" if thing.texture == "plain" else thing.texture
        words = (thing.size if mentioned() else "", thing.colour, texture, thing.shape)
        return "a " + " ".join(word for word in words if word)

    first, *others = (named(thing) for thing in picture.things)
    text = f"{first} {picture.relation} {others[0]}" if others else first
    return f"{text} on a {picture.background} background" if mentioned() else text


def vocabulary() -> list[str]:
    """All words that prompts contain."""
    looks = (*scenes.SIZES, *scenes.COLOURS, *scenes.TEXTURES, *scenes.SHAPES)
    return sorted({*" ".join((*looks, *BACKGROUNDS, *NEIGHBOURS, "a on background")).split()})


def held_out(count: int, seed: int = 2**31) -> list[tuple[Picture, str]]:
    """Pictures with full prompts that no embedded model is trained on."""
    rng = np.random.default_rng(seed)
    pictures = [draw(rng) for _ in range(count)]
    return [(picture, caption(picture)) for picture in pictures]
