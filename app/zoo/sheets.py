"""Held-out pictures of an image model of the zoo: drawn in batches, or laid out in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

BATCH = 16


def drawn(pipe: Any, asked: Sequence[Any]) -> list[Image.Image]:
    """A picture for each thing asked, the same ones every time."""
    pipe.set_progress_bar_config(disable=True)
    made: list[Image.Image] = []
    for start in range(0, len(asked), BATCH):
        made += pipe(list(asked[start : start + BATCH]), generator=torch.Generator().manual_seed(start)).images
    return made


def paired(above: Sequence[Image.Image], below: Sequence[Image.Image]) -> Image.Image:
    """Two halves of pairs, one over the other: above each picture stands its like."""
    across, side = len(above) // 2, above[0].width + 2
    whole = Image.new("RGB", (across * side, 4 * side), "white")
    for i, pair in enumerate(zip(above, below, strict=True)):
        x, y = i % across * side, i // across * 2 * side
        for row, picture in enumerate(pair):
            whole.paste(picture, (x, y + row * side))
    return whole
