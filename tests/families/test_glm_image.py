"""GLM-Image at the size at which it is used: the grids of 1024 × 1024, and those of a picture made of a picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_image_models
import torch
from torch import Tensor
from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

import mmspec
from mmspec.drafters.jacobi import JacobiDrafter

BEGIN, END = 120, tiny_image_models.BEGIN  # of a picture


def grids(height: int, width: int) -> Tensor:
    """[2, 3]: the picture's and the preview's, as the processor of transformers has them."""
    shape = GlmImageProcessor._get_target_shape(SimpleNamespace(), height, width)  # type: ignore[arg-type]
    return GlmImageProcessor._build_target_image_grid_thw(*shape)


def call(ids: list[int], thw: Tensor, new: int) -> dict[str, Any]:
    one = tiny_image_models.ragged([ids])
    return {**one, "image_grid_thw": thw, "images_per_sample": torch.tensor([len(thw)]), "max_new_tokens": new}


def seeded(asked: dict[str, Any]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    tokens = tiny_image_models.model("glm_image").generate(**asked, do_sample=True, temperature=1.0, top_k=0)
    return tokens, torch.get_rng_state()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grids that drafters are told."""
    seen, start = list[Any](), JacobiDrafter.start
    monkeypatch.setattr(JacobiDrafter, "start", lambda *given: (seen.append(given[3].grid), start(*given))[1])
    return seen


@pytest.mark.full
def test_a_picture_of_1024_pixels_is_the_stock_picture_in_fewer_forwards(told: list[Any]) -> None:
    model, thw = tiny_image_models.model("glm_image"), grids(1024, 1024)
    assert thw.tolist() == [[1, 32, 32], [1, 16, 16]]
    asked = call([1, 5, 6, 7, 8, 201, 212, 212, 202, BEGIN], thw, 32 * 32 + 16 * 16 + 1)
    expected, state = seeded(asked)
    reads: list[int] = []
    hook = model.get_decoder().register_forward_hook(lambda *_: reads.append(1))
    with mmspec.enable(model, drafter="jacobi", window=16, reproducible=True) as handle:
        tokens, after = seeded(asked)
    hook.remove()
    assert torch.equal(tokens, expected) and torch.equal(after, state)
    assert told == [(32, 32)] and handle.stats.tokens == 1281
    assert len(reads) == handle.stats.rounds + 1 < 1281 * 2 / 3


def test_the_grid_is_that_of_what_is_drawn(told: list[Any]) -> None:
    """A picture that is read may be larger."""
    model, source = tiny_image_models.model("glm_image"), torch.tensor([[1, 6, 6]])
    asked = call([1, 5, BEGIN, *range(36), END, 7, 8, BEGIN], torch.cat([source, torch.tensor([[1, 3, 4]])]), 13)
    expected, state = seeded(asked)
    with mmspec.enable(model, drafter="jacobi", reproducible=True):
        tokens, after = seeded(asked)
    assert torch.equal(tokens, expected) and torch.equal(after, state)
    assert told == [(3, 4)]
