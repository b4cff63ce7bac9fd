"""Small pictures with a class: one object of the scene generator, named by its colour and shape."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from mmspec.zoo import pictures, scenes
from mmspec.zoo.pictures import CELLS, SIDE, Picture
from mmspec.zoo.scenes import BACKGROUNDS, COLOURS, SHAPES, Thing

NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
PLAIN = tuple(name for name in BACKGROUNDS if name != "grainy")


@dataclass(frozen=True)
class Sample:
    """One object on a background; its class says nothing of size, texture, place and background."""

    background: str
    thing: Thing

    @property
    def label(self) -> int:
        """Its class, an index of NAMES."""
        return NAMES.index(f"{self.thing.colour} {self.thing.shape}")

    @property
    def picture(self) -> Picture:
        """The same as a picture with a prompt."""
        return Picture(self.background, (self.thing,), None, 0)


def draw(rng: np.random.Generator) -> Sample:
    """A random picture, all classes alike; the same state of `rng` gives the same one."""
    return Sample(str(rng.choice(PLAIN)), scenes.draw_thing(rng, int(rng.choice(CELLS))))


def render(sample: Sample) -> Image.Image:
    """The picture as SIDE x SIDE RGB pixels."""
    return pictures.render(sample.picture)


def crowd(rng: np.random.Generator) -> Image.Image:
    """A picture with an object in every cell, for autoencoders: most of its pixels have a colour to learn."""
    background = str(rng.choice(PLAIN))
    return pictures.render(Picture(background, tuple(scenes.draw_thing(rng, cell) for cell in CELLS), None, 0))


def covered(sample: Sample) -> np.ndarray:
    """bool [SIDE, SIDE]: the pixels of the box around its object."""
    near = (np.abs(np.arange(SIDE) - at) <= sample.thing.radius for at in (sample.thing.y, sample.thing.x))
    rows, columns = near
    return rows[:, None] & columns


def held_out(count: int, seed: int = 2**31) -> list[Sample]:
    """Pictures that no embedded model is trained on."""
    rng = np.random.default_rng(seed)
    return [draw(rng) for _ in range(count)]
