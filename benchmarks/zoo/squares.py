"""A lesson beside drawing: throw-away classifiers tell from hidden states what every square of a picture shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.zoo import pictures, scenes
from mmspec.zoo.pictures import SIDE, Picture

LOOKS = {"colour": scenes.COLOURS, "texture": scenes.TEXTURES, "shape": scenes.SHAPES, "size": scenes.SIZES}
KINDS = (*(1 + len(words) for words in LOOKS.values()), 16)  # values of each number of `shown`
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
    told = np.zeros((grid * grid, len(KINDS)), np.int8)
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
        self.linear = nn.Linear(width, sum(KINDS))
        self.emphasis = emphasis

    def forward(self, hidden: Tensor, truth: Tensor) -> Tensor:
        """Sum over the numbers of `shown`, truth [R, 5], of their mean cross entropy from hidden [R, width]."""
        weights = torch.where(truth[:, 0] > 0, self.emphasis, 1.0)
        told = self.linear(F.rms_norm(hidden, hidden.shape[-1:])).split(KINDS, 1)
        each = [F.cross_entropy(one, truth[:, i].long(), reduction="none") for i, one in enumerate(told)]
        return torch.stack([(some * weights).sum() / weights.sum() for some in each]).sum()
