"""What the image suite draws, and the painter that it times."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mmspec.app.bench import image_plain
from mmspec.app.bench.image_methods import ImageMethod
from mmspec.app.engine import wait
from mmspec.app.painter import ImageResult, ImageSubject
from mmspec.zoo.pictures import Picture


@dataclass(frozen=True)
class ImagePrompts:
    """What is to be drawn: prompts or classes, and where they are known, the scenes that they describe."""

    prompts: Sequence[Any]
    scenes: Sequence[Picture] = ()
    real: Sequence[Image.Image] = ()

    def first(self, count: int) -> ImagePrompts:
        return ImagePrompts(self.prompts[:count], self.scenes[:count], self.real[:count])


@dataclass
class ImageBench:
    """What stays the same over a whole run."""

    painter: ImageSubject
    seed: int

    def go(self, method: ImageMethod) -> None:
        """Decode by this method from now on."""
        image_plain.end(self.painter.pipe)
        self.painter.go(method.way)
        if method.plain:
            image_plain.begin(self.painter.pipe, compiled=method.plain == "compiled")

    def call(self, method: ImageMethod, group: Sequence[tuple[Any, int]]) -> ImageResult:
        """One timed call over (prompt, seed) pairs."""
        self.go(method)
        gc.collect()
        wait(self.painter.device)
        return self.painter.paint([prompt for prompt, _ in group], [seed for _, seed in group])
