"""How good generated pictures are: Fréchet distance, precision and recall, on the features of a backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from benchmarks.suites.faithful import on_canvas
from mmspec.app import embedded

EMBEDDED = f"{embedded.MODEL} tower"
BATCH = 32
NEIGHBOURS = 3  # of precision and recall

Features = Callable[[Sequence[Image.Image]], Tensor]  # pictures → [n, D], float64, on the CPU


class QualityError(Exception):
    """Quality that cannot be measured; the message says what came, what is allowed and what to do."""


def frechet(a: Tensor, b: Tensor) -> float:
    """Fréchet distance of the Gaussians with the means and covariances of two sets of features [n, D].

    |μa − μb|² + tr(Ca + Cb − 2 (Ca Cb)^½). With Ca = AᵀA and Cb = BᵀB the last trace is the sum of the singular values
    of A Bᵀ, so no matrix root is taken, and fewer pictures than dimensions do no harm to the arithmetic. They do to
    the meaning: the distance is biased upwards by about 1/n, so only sets of equal size may be compared.

    Raises:
        QualityError: fewer than two pictures on a side, or a feature that is no number.
    """
    if min(len(a), len(b)) < 2 or not (a.isfinite().all() and b.isfinite().all()):
        raise QualityError(f"a Fréchet distance needs at least 2 pictures and finite features; got {len(a)}, {len(b)}")
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
        QualityError: a set with no more than k pictures.
    """
    if min(len(real), len(made)) <= neighbours:
        raise QualityError(f"precision needs more than {neighbours} pictures a set; got {len(real)} and {len(made)}")

    def covered(points: Tensor, manifold: Tensor) -> float:
        reach = _distances(manifold, manifold).kthvalue(neighbours + 1, dim=1).values  # the nearest is the point itself
        return float((_distances(points, manifold) <= reach).any(1).double().mean())

    return covered(made, real), covered(real, made)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def backbone(name: str, device: torch.device) -> Features:
    """Features of the embedded vision tower, or of any timm model with its pretrained weights.

    Args:
        name: EMBEDDED, a timm name such as 'inception_v3', or timm's 'local-dir:FOLDER' and 'hf-hub:OWNER/NAME'.

    Raises:
        QualityError: no such model, or its weights are not here and cannot be fetched.
    """
    return _tower(device) if name == EMBEDDED else _timm(name, device)


def _tower(device: torch.device) -> Features:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    try:
        folder = embedded.resolve(embedded.MODEL)
    except FileNotFoundError as error:
        raise QualityError(f"{error}; or name a timm backbone") from error
    tower = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).model.vision_tower
    tower = tower.to(device).eval()
    prepare = AutoProcessor.from_pretrained(folder).image_processor

    def features(pictures: Sequence[Image.Image]) -> Tensor:
        pixels = prepare([on_canvas(picture) for picture in pictures], return_tensors="pt")["pixel_values"]
        return tower(pixels.to(device)).last_hidden_state.mean(1)

    return _in_batches(features)


def _timm(name: str, device: torch.device) -> Features:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    if name.startswith("local-dir:") and not Path(name.removeprefix("local-dir:")).is_dir():
        raise QualityError(f"no folder {name.removeprefix('local-dir:')!r}; it must hold a timm model")
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0).to(device).eval()
    except Exception as error:  # an unknown name, no network, a broken file: the measurement cannot be made
        reason = str(error).strip().partition("\n")[0][:200]
        raise QualityError(
            f"no pretrained timm backbone {name!r} here ({type(error).__name__}: {reason}); choose a name of "
            f"timm.list_pretrained(), 'local-dir:FOLDER', or leave --backbone out for the embedded tower"
        ) from error
    prepare = create_transform(**resolve_model_data_config(model), is_training=False)

    def features(pictures: Sequence[Image.Image]) -> Tensor:
        return model(torch.stack([prepare(picture.convert("RGB")) for picture in pictures]).to(device))

    return _in_batches(features)


def _in_batches(some: Callable[[Sequence[Image.Image]], Tensor]) -> Features:
    @torch.inference_mode()
    def all_of(pictures: Sequence[Image.Image]) -> Tensor:
        starts = range(0, len(pictures), BATCH)
        return torch.cat([some(pictures[start : start + BATCH]).cpu().double() for start in starts])

    return all_of
