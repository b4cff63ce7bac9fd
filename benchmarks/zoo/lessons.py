"""What an image model is taught of a small picture beside its codes: which squares count, and what the prompt means."""

import numpy as np

from mmspec.zoo import scenes
from mmspec.zoo.pictures import SIDE, Picture
from mmspec.zoo.scenes import BACKGROUNDS, Thing


def covered(picture: Picture, side: int) -> np.ndarray:
    """bool [side, side]: which squares of the picture its objects touch, by the boxes around them."""
    step = SIDE / side
    edges = np.arange(side) * step
    touched = np.zeros((side, side), bool)
    for thing in picture.things:
        columns, rows = ((edges + step > at - thing.radius) & (edges < at + thing.radius) for at in (thing.x, thing.y))
        touched |= rows[:, None] & columns
    return touched


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
