"""How good generated pictures are: distances of features to plain decoding and to real pictures, and faithfulness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, LlavaForConditionalGeneration

from benchmarks.suites.gallery import Gallery
from benchmarks.zoo.faithful import PictureReader, on_canvas
from mmspec.app import embedded
from mmspec.app.bench.command import BenchError
from mmspec.app.bench.report import Record
from mmspec.zoo.pictures import Picture

EMBEDDED = f"{embedded.MODEL} tower"
BATCH = 32
NEIGHBOURS = 3  # of precision and recall

Features = Callable[[Sequence[Image.Image]], Tensor]  # pictures → [n, D], float64, on the CPU


def frechet(a: Tensor, b: Tensor) -> float:
    """Fréchet distance of the Gaussians with the means and covariances of two sets of features [n, D].

    |μa − μb|² + tr(Ca + Cb − 2 (Ca Cb)^½). With Ca = AᵀA and Cb = BᵀB the last trace is the sum of the singular values
    of A Bᵀ, so no matrix root is taken, and fewer pictures than dimensions do no harm to the arithmetic. They do to
    the meaning: the distance is biased upwards by about 1/n, so only sets of equal size may be compared.

    Raises:
        BenchError: fewer than two pictures on a side, or a feature that is no number.
    """
    if min(len(a), len(b)) < 2 or not (a.isfinite().all() and b.isfinite().all()):
        raise BenchError(f"a Fréchet distance needs at least 2 pictures and finite features; got {len(a)}, {len(b)}")
    a, b = a.double(), b.double()
    roots = [(x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b)]
    upper = [torch.linalg.qr(x, mode="r")[1] for x in roots]  # the same products, min(n, D) rows
    shared = torch.linalg.svdvals(upper[0] @ upper[1].T).sum()
    spreads = sum(x.square().sum() for x in roots)
    distance = (a.mean(0) - b.mean(0)).square().sum() + spreads - 2 * shared
    return max(0.0, float(distance))


def precision_recall(real: Tensor, made: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Share of `made` inside the manifold of `real`, and of `real` inside that of `made`.

    A manifold is the union of balls around its points that reach to their k-th neighbour
    (Kynkäänniemi et al. 2019, arXiv 1904.06991, §2).

    Raises:
        BenchError: a set with no more than k pictures.
    """
    if min(len(real), len(made)) <= neighbours:
        raise BenchError(f"precision needs more than {neighbours} pictures a set; got {len(real)} and {len(made)}")

    def covered(points: Tensor, manifold: Tensor) -> float:
        reach = _distances(manifold, manifold).kthvalue(neighbours + 1, dim=1).values  # the nearest is the point itself
        return float((_distances(points, manifold) <= reach).any(1).double().mean())

    return covered(made, real), covered(real, made)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def tower(device: torch.device) -> Features:
    """Features of the embedded vision tower."""
    folder = embedded.resolve(embedded.MODEL)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).model.vision_tower
    model = model.to(device).eval()
    prepare = AutoProcessor.from_pretrained(folder).image_processor

    @torch.inference_mode()
    def features(pictures: Sequence[Image.Image]) -> Tensor:
        parts = []
        for start in range(0, len(pictures), BATCH):
            shown = [on_canvas(picture) for picture in pictures[start : start + BATCH]]
            pixels = prepare(shown, return_tensors="pt")["pixel_values"].to(device)
            parts.append(model(pixels).last_hidden_state.mean(1).cpu().double())
        return torch.cat(parts)

    return features


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
        self, plain: Callable[[int], Gallery], runs: Sequence[int], asked: ImagePrompts, device: torch.device
    ) -> None:
        self.features, self.asked = tower(device), asked
        self.reader = PictureReader(str(device)) if asked.scenes else None
        self.runs = {run: plain(run) for run in runs}
        seen = [self.features(run.images) for run in self.runs.values()]
        self.reference, self.real = seen[0], self.features(asked.real) if asked.real else None
        self.noise = [frechet(a, b) for a, b in combinations(seen, 2)]

    def look(self, images: Sequence[Image.Image]) -> tuple[Tensor, float, float | None, Record]:
        """The features of pictures, their distances to the reference and to real pictures, and the reader's scores."""
        seen = self.features(images)
        real = None if self.real is None else frechet(self.real, seen)
        read = self.reader.score(images, self.asked.scenes) if self.reader is not None else {}
        return seen, frechet(self.reference, seen), real, read
