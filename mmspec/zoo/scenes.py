"""Generator of drawn scenes, the only pictures that the embedded models were trained on; used by the demo and bench."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 96  # pixels of a rendered scene
CELL = SIDE // 3  # the objects are on a 3x3 grid
COLOURS = {
    "red": (215, 35, 40),
    "green": (35, 160, 60),
    "blue": (45, 75, 230),
    "yellow": (242, 222, 45),
    "purple": (145, 55, 190),
    "orange": (245, 138, 30),
    "cyan": (60, 210, 222),
    "pink": (252, 155, 195),
}
BACKGROUNDS = {
    "white": (246, 246, 246),
    "grey": (132, 132, 132),
    "black": (18, 18, 18),
    "beige": (224, 205, 172),
    "grainy": (168, 168, 160),
    "lined": (232, 236, 240),
    "chequered": (206, 206, 206),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring", "star")
TEXTURES = ("plain", "striped", "dotted")
SIZES = {"small": (7.6, 9.0), "large": (12.0, 13.4)}  # range of the radius in pixels
COUNT_WEIGHTS = np.array([0.08, 0.15, 0.23, 0.24, 0.18, 0.12])  # probabilities of one to six objects
JITTER = 2.0  # largest offset of an object from the middle of its cell, in pixels
RELATIONS = ("left of", "right of", "above", "below")
_ZOOM = 2  # drawn larger by this factor, then averaged down


@dataclass(frozen=True)
class Thing:
    """One drawn object; `x`, `y` (centre) and `radius` in pixels, `cell` counts the grid in reading order from 0."""

    shape: str
    colour: str
    texture: str
    size: str
    cell: int
    x: float
    y: float
    radius: float

    @property
    def column(self) -> int:
        return self.cell % 3

    @property
    def row(self) -> int:
        return self.cell // 3


@dataclass(frozen=True)
class Scene:
    """A background and its objects in reading order; `grain` seeds the noise of a grainy background."""

    background: str
    things: tuple[Thing, ...]
    grain: int


def draw(rng: np.random.Generator) -> Scene:
    """A random scene, determined by the state of `rng`."""
    count = 1 + int(rng.choice(len(COUNT_WEIGHTS), p=COUNT_WEIGHTS))
    cells = np.sort(rng.choice(9, size=count, replace=False))
    things = tuple(draw_thing(rng, int(cell)) for cell in cells)
    return Scene(str(rng.choice(list(BACKGROUNDS))), things, int(rng.integers(2**31)))


def drawn() -> Image.Image:
    """A picture of a new random scene."""
    return render(draw(np.random.default_rng()))


def draw_thing(rng: np.random.Generator, cell: int) -> Thing:
    """A random object in one cell of the grid."""
    size = str(rng.choice(list(SIZES)))
    x, y = (CELL * np.array([cell % 3 + 0.5, cell // 3 + 0.5]) + rng.uniform(-JITTER, JITTER, 2)).tolist()
    shape, colour, texture = (str(rng.choice(list(some))) for some in (SHAPES, COLOURS, TEXTURES))
    return Thing(shape, colour, texture, size, cell, x, y, float(rng.uniform(*SIZES[size])))


def relations(first: Thing, second: Thing) -> tuple[str, ...]:
    """The relations of `first` to `second`, by column and row of the grid: none, one or two of RELATIONS."""
    across = {-1: ("left of",), 0: (), 1: ("right of",)}[int(np.sign(first.column - second.column))]
    down = {-1: ("above",), 0: (), 1: ("below",)}[int(np.sign(first.row - second.row))]
    return across + down


def counts(scene: Scene, attribute: str = "shape") -> dict[str, int]:
    """The number of objects with each value of `attribute` (shape, colour, texture or size), in order of appearance."""
    return dict(Counter(getattr(thing, attribute) for thing in scene.things))


def render(scene: Scene) -> Image.Image:
    """The scene as an RGB picture of SIDE x SIDE pixels."""
    canvas = Image.fromarray(_background(scene))
    for thing in scene.things:
        mask = Image.new("L", canvas.size, 0)
        _outline(ImageDraw.Draw(mask), thing)
        low, high = thing.radius + 1, thing.radius + 2
        box = (
            int((thing.x - low) * _ZOOM),
            int((thing.y - low) * _ZOOM),
            int((thing.x + high) * _ZOOM),
            int((thing.y + high) * _ZOOM),
        )
        canvas.paste(_fill(thing, box), box[:2], mask.crop(box))
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def _background(scene: Scene) -> np.ndarray:
    side = SIDE * _ZOOM
    pixels = np.full((side, side, 3), BACKGROUNDS[scene.background], np.uint8)
    if scene.background == "grainy":
        noise = np.random.default_rng(scene.grain).normal(0, 26, (SIDE, SIDE, 1)).repeat(_ZOOM, 0).repeat(_ZOOM, 1)
        return np.clip(pixels + noise, 0, 255).astype(np.uint8)
    if scene.background == "lined":
        pixels[(np.arange(side) // _ZOOM + scene.grain) % 8 == 0] = (150, 175, 205)
    if scene.background == "chequered":
        squares = (np.arange(side) // (8 * _ZOOM)) % 2
        pixels[squares[:, None] == squares[None]] = (166, 166, 166)
    return pixels


def _outline(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    x, y, r = thing.x * _ZOOM, thing.y * _ZOOM, thing.radius * _ZOOM
    if thing.shape in ("circle", "ring"):
        pen.ellipse((x - r, y - r, x + r, y + r), fill=255)
    if thing.shape == "ring":
        pen.ellipse((x - r * 0.5, y - r * 0.5, x + r * 0.5, y + r * 0.5), fill=0)
    if thing.shape == "square":
        pen.rectangle((x - r * 0.88, y - r * 0.88, x + r * 0.88, y + r * 0.88), fill=255)
    if thing.shape == "cross":
        pen.rectangle((x - r, y - r * 0.34, x + r, y + r * 0.34), fill=255)
        pen.rectangle((x - r * 0.34, y - r, x + r * 0.34, y + r), fill=255)
    if thing.shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r * 0.8), (x + r, y + r * 0.8)], fill=255)
    if thing.shape == "diamond":
        pen.polygon([(x, y - r), (x - r * 0.72, y), (x, y + r), (x + r * 0.72, y)], fill=255)
    if thing.shape == "star":
        angles = np.pi * np.arange(10) / 5
        reach = r * np.where(np.arange(10) % 2, 0.42, 1.0)
        pen.polygon(np.stack([x + reach * np.sin(angles), y - reach * np.cos(angles)], 1).ravel().tolist(), fill=255)


def _fill(thing: Thing, box: tuple[int, int, int, int]) -> Image.Image:
    """The texture of one object as a picture of the size of `box`."""
    colour = np.array(COLOURS[thing.colour])
    rows, columns = np.ogrid[box[1] : box[3], box[0] : box[2]]
    rows, columns = rows - thing.y * _ZOOM, columns - thing.x * _ZOOM
    pixels = np.broadcast_to(colour, (box[3] - box[1], box[2] - box[0], 3)).astype(np.uint8)
    step = 5 * _ZOOM
    if thing.texture == "striped":
        pixels[np.broadcast_to(rows % step < 2 * _ZOOM, pixels.shape[:2])] = colour * 0.38
    if thing.texture == "dotted":
        near = ((rows % step) - step / 2) ** 2 + ((columns % step) - step / 2) ** 2 < (1.45 * _ZOOM) ** 2
        pixels[near] = 255
    return Image.fromarray(pixels)
