"""Measures the quality of methods on many pictures, against plain decoding, real pictures and the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from PIL import Image
from torch import Tensor

from benchmarks.suites import quality
from benchmarks.suites.gallery import Gallery
from benchmarks.suites.quality import QualityError
from mmspec.app.bench.command import BenchError
from mmspec.app.bench.report import Record
from mmspec.zoo.pictures import Picture


@dataclass(frozen=True)
class ImagePrompts:
    """Prompts or classes, with the scenes that they describe if known."""

    prompts: Sequence[str | int]
    scenes: Sequence[Picture] = ()
    real: Sequence[Image.Image] = ()


class Judge:
    """Compares methods on the same prompts: run 0 of plain decoding is the reference, its other runs give the noise.

    Attributes:
        runs: the results of plain decoding, by the number of the run.
        noise: the distances between these runs.
    """

    def __init__(
        self, plain: Callable[[int], Gallery], runs: Sequence[int], asked: ImagePrompts, backbone: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        try:
            self.features = quality.backbone(backbone, device)
        except QualityError as error:
            raise BenchError(str(error)) from error
        self.asked, self.reader = asked, None
        if asked.scenes:
            from benchmarks.suites.faithful import PictureReader

            self.reader = PictureReader(str(device))
        self.runs = {run: plain(run) for run in runs}
        seen = [self.features(run.images) for run in self.runs.values()]
        self.reference, self.real = seen[0], self.features(asked.real) if asked.real else None
        self.noise = [quality.frechet(a, b) for a, b in combinations(seen, 2)]

    def look(self, images: Sequence[Image.Image]) -> tuple[Tensor, float, float | None, Record]:
        """The features of pictures, their distances to the reference and to real pictures, and the reader's scores."""
        seen = self.features(images)
        real = None if self.real is None else quality.frechet(self.real, seen)
        read = self.reader.score(images, self.asked.scenes) if self.reader is not None else {}
        return seen, quality.frechet(self.reference, seen), real, read
