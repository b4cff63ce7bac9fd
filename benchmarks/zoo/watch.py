"""Before a decoder tells what moves, its lower layers learn, by auxiliary heads, what happened in every cell."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.zoo import clips, fit, pack, tower
from benchmarks.zoo.clips import Clip
from benchmarks.zoo.fit import Say
from benchmarks.zoo.recipes.vlm import VlmRecipe, Watching
from benchmarks.zoo.vlm import ZooVlm, kind, on_packed_rows
from mmspec.zoo import scenes

STREAM = 8  # of random numbers
KINDS = tuple(clips.TOLD)
FIELDS = {  # of a cell of the grid
    "was": ("none", *scenes.SHAPES),  # shape at first
    "colour": tuple(scenes.COLOURS),  # of what was there at first
    "went": KINDS,  # what became of that
    "came": KINDS,  # how that which is there at last came to be there
}


def cell_labels(shown: list[Clip]) -> Tensor:
    """Class per clip, grid cell and field, [B, 9, 4]; IGNORED where there is nothing to say."""
    labels = torch.full((len(shown), 9, len(FIELDS)), pack.IGNORED)
    labels[:, :, 0] = 0
    for row, clip in enumerate(shown):
        for thing, motion in clip.parts:
            kind = KINDS.index(motion.kind)
            if motion.kind != "appears":
                labels[row, thing.cell, 0] = 1 + scenes.SHAPES.index(thing.shape)
                labels[row, thing.cell, 1] = list(scenes.COLOURS).index(thing.colour)
                labels[row, thing.cell, 2] = kind
            if motion.kind != "vanishes":
                labels[row, clips.last_cell(thing, motion), 3] = kind
    return labels


class ClipReader(tower.PatchReader):
    """A model that ends with its lower layers, and classifiers on the patches of the last picture.

    `whole` gives the model its upper layers back.
    """

    def __init__(self, model: ZooVlm, recipe: VlmRecipe, plan: Watching) -> None:
        super().__init__()
        self.model, self.kind = model, kind(model)
        decoder = model.model.language_model
        self.upper, self.last = decoder.layers[plan.layers :], decoder.norm
        decoder.layers, decoder.norm = decoder.layers[: plan.layers], nn.Identity()
        self.read(recipe.language.width, recipe.vision.patch, [*map(len, FIELDS.values())])

    def whole(self) -> None:
        """Put the upper layers back."""
        decoder = self.model.model.language_model
        decoder.layers, decoder.norm = decoder.layers.extend(self.upper), self.last

    def forward(self, pixels: Tensor, pictures: int) -> tuple[Tensor, ...]:
        """As `told`, from `pictures` pictures for each of B clips."""
        patches, rows = len(self.cells), len(pixels) // pictures
        shown = pack.pack([[]] * rows, pictures, patches, 0, self.kind.FRAME)
        with fit.autocast():
            hidden = self.kind.packed_hidden(self.model, shown, pixels)
        visual = hidden[shown.ids == pack.IMAGE].unflatten(0, (rows, -1))
        return self.told(visual[:, -patches:])

    def loss(self, shown: list[Clip], pixels: Tensor, pictures: int) -> Tensor:
        """Mean cross entropy over the fields."""
        return tower.field_loss(self(pixels, pictures), cell_labels(shown)[:, self.cells])


def train(recipe: VlmRecipe, model: ZooVlm, folder: Path, say: Say, compiled: bool = True) -> None:
    """The stage, or on from its checkpoint in `folder`."""
    plan = recipe.watching
    assert plan is not None
    torch.manual_seed(recipe.seed)
    reader = ClipReader(model, recipe, plan)

    def loss_of(step: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng([recipe.seed, STREAM, step])
        pictures = plan.pictures[step % len(plan.pictures)]
        shown = [clips.draw(rng) for _ in range(plan.plan.batch * 2 // pictures)]
        frames = [clips.at(clip, time) for clip in shown for time in clips.moments(pictures, rng)]
        return reader.loss(shown, tower.pixels(frames), pictures), len(frames) * len(reader.cells)

    with on_packed_rows(model, compiled):
        fit.fit(reader, plan.plan, loss_of, folder / "watching.pt", say)
    reader.whole()
