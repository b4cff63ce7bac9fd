"""GLM-Image at the size at which it is used: the grids of 1024 × 1024, and those of a picture made of a picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_image_models
import torch
from compared import as_stock
from torch import Tensor
from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

from mmspec.drafters.jacobi import JacobiDrafter

BEGIN, END = 120, tiny_image_models.BEGIN  # of a picture


def grids(height: int, width: int) -> Tensor:
    """[2, 3]: the picture's and the preview's, as the processor of transformers has them."""
    shape = GlmImageProcessor._get_target_shape(SimpleNamespace(), height, width)  # type: ignore[arg-type]
    return GlmImageProcessor._build_target_image_grid_thw(*shape)


def call(ids: list[int], thw: Tensor, new: int) -> dict[str, Any]:
    one = tiny_image_models.ragged([ids])
    return {**one, "image_grid_thw": thw, "images_per_sample": torch.tensor([len(thw)]), "max_new_tokens": new}


def drawn(asked: dict[str, Any], **options: Any) -> Any:
    """The picture of a seed is stock's; what was drafted for it."""
    call = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    return as_stock(tiny_image_models.model("glm_image"), asked, "jacobi", call=call, seed=7,
                    draw=tiny_image_models.draw, reproducible=True, **options).stats  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grids that drafters are told."""
    seen, start = list[Any](), JacobiDrafter.start
    monkeypatch.setattr(JacobiDrafter, "start", lambda *given: (seen.append(given[3].grid), start(*given))[1])
    return seen


@pytest.mark.full
def test_a_picture_of_1024_pixels_is_the_stock_picture_in_fewer_forwards(told: list[Any]) -> None:
    thw = grids(1024, 1024)
    assert thw.tolist() == [[1, 32, 32], [1, 16, 16]]
    asked = call([1, 5, 6, 7, 8, 201, 212, 212, 202, BEGIN], thw, 32 * 32 + 16 * 16 + 1)
    reads: list[int] = []
    with tiny_image_models.model("glm_image").get_decoder().register_forward_hook(lambda *_: reads.append(1)):
        stats = drawn(asked, window=16, begun=lambda _: reads.clear())
    assert told == [(32, 32)] and stats.tokens == 1281
    assert len(reads) == stats.rounds + 1 < 1281 * 2 / 3


def test_the_grid_is_that_of_what_is_drawn(told: list[Any]) -> None:
    """A picture that is read may be larger."""
    drawn(call([1, 5, BEGIN, *range(36), END, 7, 8, BEGIN], torch.tensor([[1, 6, 6], [1, 3, 4]]), 13))
    assert told == [(3, 4)]
