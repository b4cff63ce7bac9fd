"""MSD against a literal transcription of its rows: visual ones are embeddings, all others as in EAGLE."""

from __future__ import annotations

from typing import Any

import literal
import pytest
import torch
from literal import H, Row, dense, lively, rms, weights
from torch import Tensor

from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.msd import MsdConfig, MsdDrafter


def verify_tree(drafter: Any, e: Tensor, h: Tensor, seen: list[int]) -> tuple[list[Row], literal.More]:
    w, c = weights(drafter), drafter.config

    def text(x: Tensor, feature: Tensor) -> Tensor:
        return dense(w, "fc", torch.cat([rms(w, "embed_norm", x, c.norm_eps), feature]))

    rows = []
    for j, medium in enumerate(seen):
        rows.append((rms(w, "embed_norm", e[j], c.norm_eps) if medium else text(e[j], h[j]), j))
    return rows, text


@pytest.mark.parametrize("switches", literal.SWITCHES)
def test_drafts_are_those_of_the_published_rows(switches: str) -> None:
    literal.drafts_as_written(lively(MsdDrafter, **literal.SWITCHES[switches]), literal.texts(), verify_tree)


def test_memories_join() -> None:
    literal.drafts_as_written(lively(MsdDrafter), literal.texts(1), verify_tree, apart=True)


@pytest.mark.parametrize("switches", literal.SWITCHES)
def test_training_unroll_is_decoding(switches: str) -> None:
    made = lively(MsdDrafter, **literal.SWITCHES[switches])
    assert literal.unrolls_as_written(made, literal.texts(2), verify_tree, compressed=False) == 9


def test_text_alone_is_eagle_and_images_are_not() -> None:
    msd, eagle = lively(MsdDrafter), lively(EagleDrafter)
    e, h = torch.randn(2, 1, 6, H).double()
    for seen in (torch.zeros(1, 6, dtype=torch.long), torch.tensor([[0, 1, 1, 0, 0, 0]])):
        same = torch.equal(msd(e, h, seen, seen >= 0, 1)[0][:, 3:], eagle(e, h, seen, seen >= 0, 1)[0][:, 3:])
        assert same is not bool(seen.any())


def test_eagle3s_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="EAGLE-1/2's layer"):
        MsdConfig(**literal.SHAPE, parallel_norm=True)
