"""Small pictures with a prompt: one or two objects of the scene generator on a 2x2 grid, for image generators."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from mmspec.zoo import scenes
from mmspec.zoo.scenes import BACKGROUNDS, CELL, Scene, Thing

SIDE = 2 * CELL  # pixels: the upper left four cells of a scene
CELLS = (0, 1, 3, 4)  # these cells, in the scene's own count
GRAINY = 0.3  # share of pictures on a grainy background: its codes are as hard to foretell as those of photographs
NEIGHBOURS = {  # relation: pairs of cells (first, second) that show it
    "left of": ((0, 1), (3, 4)),
    "right of": ((1, 0), (4, 3)),
    "above": ((0, 3), (1, 4)),
    "below": ((3, 0), (4, 1)),
}


@dataclass(frozen=True)
class Picture:
    """A scene whose objects all stand in CELLS, in the order in which the prompt names them."""

    background: str
    things: tuple[Thing, ...]
    relation: str | None  # of the first thing towards the second
    grain: int


def draw(rng: np.random.Generator) -> Picture:
    """A random picture; the same state of `rng` gives the same one."""
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


def covered(picture: Picture, side: int) -> np.ndarray:
    """bool [side, side]: which squares of the picture its objects touch, by the boxes around them."""
    step = SIDE / side
    edges = np.arange(side) * step
    touched = np.zeros((side, side), bool)
    for thing in picture.things:
        columns, rows = ((edges + step > at - thing.radius) & (edges < at + thing.radius) for at in (thing.x, thing.y))
        touched |= rows[:, None] & columns
    return touched


def caption(picture: Picture, rng: np.random.Generator | None = None) -> str:
    """The prompt of a picture; with `rng`, sizes and the background are left out now and then."""

    def said(chance: float = 0.75) -> bool:
        return rng is None or rng.random() < chance

    def named(thing: Thing) -> str:
        texture = "" if thing.texture == "plain" else thing.texture
        words = (thing.size if said() else "", thing.colour, texture, thing.shape)
        return "a " + " ".join(word for word in words if word)

    first, *others = (named(thing) for thing in picture.things)
    text = f"{first} {picture.relation} {others[0]}" if others else first
    return f"{text} on a {picture.background} background" if said() else text


_LAYOUTS = {None: 0, "left of": 1, "right of": 1, "above": 2, "below": 2}  # one object, two in a row, two in a column
_THING = (scenes.COLOURS, scenes.TEXTURES, scenes.SHAPES, scenes.SIZES)
KINDS = (1 + len(BACKGROUNDS), 3, *(1 + len(words) for words in 2 * _THING))  # values of each number of `meaning`


def meaning(picture: Picture, prompt: str) -> tuple[int, ...]:
    """What a prompt says of its picture: background, layout, and by reading order what either object is.

    Of an object colour, texture, shape and size, each from 1 on in the order of `scenes`; 0: unsaid, or no such object.
    """
    said = prompt.split()
    background = 1 + [*BACKGROUNDS].index(picture.background) if "on" in said else 0
    first, *others = picture.things
    at = said.index(first.shape) + 1  # what is said of the second object stands behind the first one's shape
    numbers = {first.cell: _numbers(first, said[:at])} | {thing.cell: _numbers(thing, said[at:]) for thing in others}
    objects = [numbers[cell] for cell in sorted(numbers)] + [(0,) * len(_THING)]
    return (background, _LAYOUTS[picture.relation], *objects[0], *objects[1])


def _numbers(thing: Thing, said: list[str]) -> tuple[int, ...]:
    size = 1 + [*scenes.SIZES].index(thing.size) if thing.size in said else 0
    looks = zip(_THING[:3], (thing.colour, thing.texture, thing.shape), strict=True)
    return (*(1 + [*words].index(word) for words, word in looks), size)


def vocabulary() -> list[str]:
    """Every word that a prompt can hold."""
    kinds = (
        scenes.SIZES,
        scenes.COLOURS,
        scenes.TEXTURES,
        scenes.SHAPES,
        BACKGROUNDS,
        NEIGHBOURS,
        ("a on background",),
    )
    return sorted({word for kind in kinds for phrase in kind for word in phrase.split()})


def held_out(count: int, seed: int = 2**31) -> list[tuple[Picture, str]]:
    """Pictures with full prompts that no embedded model is trained on."""
    rng = np.random.default_rng(seed)
    pictures = [draw(rng) for _ in range(count)]
    return [(picture, caption(picture)) for picture in pictures]
