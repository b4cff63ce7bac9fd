"""MSD against a literal transcription of its rows: visual ones are embeddings, all others as in EAGLE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transcribed_drafters
from torch import Tensor
from transcribed_drafters import H, Row, dense, lively, rms, weights

from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.msd import MsdDrafter


def verify_tree(drafter: Any, e: Tensor, h: Tensor, seen: list[int]) -> tuple[list[Row], transcribed_drafters.More]:
    w, c = weights(drafter), drafter.config

    def text(x: Tensor, feature: Tensor) -> Tensor:
        return dense(w, "fc", torch.cat([rms(w, "embed_norm", x, c.norm_eps), feature]))

    rows = []
    for j, medium in enumerate(seen):
        rows.append((rms(w, "embed_norm", e[j], c.norm_eps) if medium else text(e[j], h[j]), j))
    return rows, text


@pytest.mark.parametrize("switches", transcribed_drafters.SWITCHES)
def test_drafts_are_those_of_the_published_rows(switches: str) -> None:
    transcribed_drafters.drafts_as_written(
        lively(MsdDrafter, **transcribed_drafters.SWITCHES[switches]), transcribed_drafters.texts(), verify_tree
    )


def test_memories_join() -> None:
    transcribed_drafters.drafts_as_written(lively(MsdDrafter), transcribed_drafters.texts(1), verify_tree, apart=True)


@pytest.mark.parametrize("switches", transcribed_drafters.SWITCHES)
def test_training_unroll_is_decoding(switches: str) -> None:
    made = lively(MsdDrafter, **transcribed_drafters.SWITCHES[switches])
    assert (
        transcribed_drafters.unrolls_as_written(made, transcribed_drafters.texts(2), verify_tree, compressed=False) == 9
    )


def test_text_alone_is_eagle_and_images_are_not() -> None:
    msd, eagle = lively(MsdDrafter), lively(EagleDrafter)
    e, h = torch.randn(2, 1, 6, H).double()
    for seen in (torch.zeros(1, 6, dtype=torch.long), torch.tensor([[0, 1, 1, 0, 0, 0]])):
        same = torch.equal(msd(e, h, seen, seen >= 0, 1)[0][:, 3:], eagle(e, h, seen, seen >= 0, 1)[0][:, 3:])
        assert same is not bool(seen.any())
