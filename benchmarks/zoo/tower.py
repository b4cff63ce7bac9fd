"""First stage of a zoo VLM: the vision tower alone learns what stands in every cell of the grid, by auxiliary heads."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo import fit, sheets
from benchmarks.zoo.language import LOOKS
from benchmarks.zoo.pack import IGNORED
from mmspec.zoo import scenes
from mmspec.zoo.scenes import Scene

FIELDS = LOOKS | {"shape": ("none", *scenes.SHAPES)}
See = Callable[[nn.Module, torch.Tensor], torch.Tensor]  # a tower and pictures [N, 3, S, S] to [N, tokens, width]


def pixels(shown: list[Scene]) -> torch.Tensor:
    """What the exported image processor makes of the rendered scenes: [B, 3, SIDE, SIDE] in -1..1."""
    return sheets.pixels([scenes.render(scene) for scene in shown])


def cell_labels(shown: list[Scene]) -> torch.Tensor:
    """Class per scene, grid cell and field, [B, 9, 5]: FIELDS and the background; IGNORED where a cell is empty."""
    labels = torch.full((len(shown), 9, len(FIELDS) + 1), IGNORED)
    labels[:, :, 0] = 0
    for row, scene in enumerate(shown):
        labels[row, :, -1] = list(scenes.BACKGROUNDS).index(scene.background)
        for thing in scene.things:
            for column, (field, values) in enumerate(FIELDS.items()):
                labels[row, thing.cell, column] = values.index(getattr(thing, field))
    return labels


def cell_of_patch(patch: int) -> torch.Tensor:
    """Grid cell that holds the middle of each patch, in the order of the visual tokens."""
    middle = (torch.arange(scenes.SIDE // patch) * patch + patch // 2) // scenes.CELL
    return (middle[:, None] * 3 + middle[None]).flatten()


class PatchReader(nn.Module):
    """A network with a linear classifier per field on every patch; these are thrown away after the stage."""

    cells: torch.Tensor  # of each patch

    def read(self, width: int, patch: int, classes: list[int]) -> None:
        """Put the classifiers behind what is there already."""
        self.classes, self.norm = classes, nn.LayerNorm(width)
        self.heads = nn.Linear(width, sum(classes))
        self.register_buffer("cells", cell_of_patch(patch), persistent=False)

    def told(self, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [B, patches, classes] of what is seen on the patches, one tensor per field."""
        fields: tuple[torch.Tensor, ...] = self.heads(self.norm(seen.float())).split(self.classes, -1)
        return fields


class CellReader(PatchReader):
    """The tower with its classifiers."""

    def __init__(self, tower: nn.Module, see: See, width: int, patch: int) -> None:
        super().__init__()
        self.tower, self.see = tower, see
        self.read(width, patch, [*map(len, FIELDS.values()), len(scenes.BACKGROUNDS)])

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with fit.autocast():
            seen = self.see(self.tower, pixel_values)
        return self.told(seen)

    def loss(self, shown: list[Scene]) -> torch.Tensor:
        """Mean cross entropy over the fields."""
        return field_loss(self(pixels(shown)), cell_labels(shown)[:, self.cells])


def field_loss(told: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the fields, from logits [B, patches, classes] a field and labels [B, patches, fields],
    some IGNORED."""
    each = [F.cross_entropy(logits.flatten(0, 1), labels[:, :, i].flatten(), ignore_index=IGNORED)
            for i, logits in enumerate(told)]  # fmt: skip
    return sum(each, torch.zeros(())) / len(told)
