"""What an image model is taught of a small picture beside drawing: what its squares show, and what the prompt means."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.zoo import pictures, scenes
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


LOOKS = {"colour": scenes.COLOURS, "texture": scenes.TEXTURES, "shape": scenes.SHAPES, "size": scenes.SIZES}
SQUARES = (*(1 + len(words) for words in LOOKS.values()), 16)  # values of each number of `shown`
_APART = 24  # levels, summed over colours, by which an object differs from the background


def shown(picture: Picture, grid: int) -> np.ndarray:
    """int8 [grid², 5] of a picture's squares in reading order.

    Colour, texture, shape and size of the object whose box touches the square, each from 1 on in the order of
    `scenes`, 0: no object; and which of the square's four quarters an object fills, as the bits of a number.
    """
    step, inside = SIDE // grid, np.arange(SIDE)
    bare = pictures.render(replace(picture, things=()))
    far = np.abs(np.asarray(pictures.render(picture), int) - np.asarray(bare, int)).sum(2)
    quarters = (far > _APART).reshape(grid, 2, step // 2, grid, 2, step // 2).mean((2, 5)) > 0.5
    told = np.zeros((grid * grid, len(SQUARES)), np.int8)
    told[:, -1] = quarters.transpose(0, 2, 1, 3).reshape(grid * grid, 4) @ np.array([1, 2, 4, 8])
    for thing in picture.things:
        rows, columns = (np.abs(inside - at) <= thing.radius for at in (thing.y, thing.x))
        touched = (rows[:, None] & columns).reshape(grid, step, grid, step).any((1, 3)).ravel()
        told[touched, :-1] = [1 + [*words].index(getattr(thing, look)) for look, words in LOOKS.items()]
    return told


class Probe(nn.Module):
    """A linear classifier of hidden states; squares that objects touch count `emphasis` times."""

    def __init__(self, width: int, emphasis: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, sum(SQUARES))
        self.emphasis = emphasis

    def forward(self, hidden: Tensor, truth: Tensor) -> Tensor:
        """Sum over the numbers of `shown`, truth [R, 5], of their mean cross entropy from hidden [R, width]."""
        weights = torch.where(truth[:, 0] > 0, self.emphasis, 1.0)
        told = self.linear(F.rms_norm(hidden, hidden.shape[-1:])).split(SQUARES, 1)
        each = [F.cross_entropy(one, truth[:, i].long(), reduction="none") for i, one in enumerate(told)]
        return torch.stack([(some * weights).sum() / weights.sum() for some in each]).sum()
