"""Pruning without training: a drafter reads only some of a prompt's visual rows, evenly spaced."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.kernels import reference as ops
from mmspec.types import gather_rows


def pruned(share: float, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The arguments of a drafter's `encode_prompt` without a share of the visual rows; positions do not change.

    Args:
        share: share of each prompt's visual rows to leave out, between 0 and 1.
        given: embeds, features, visual, valid and positions, [B, L, …] each.
    """
    if not share:
        return given
    embeds, features, visual, valid, positions = given
    stay = valid & kept(visual * valid, share)
    most = int(stay.sum(1).max())
    order = stay.to(torch.uint8).argsort(dim=1, stable=True)[:, stay.shape[1] - most :]  # padding comes first
    return tuple(gather_rows(t, order) for t in (embeds, features, visual, stay, positions))


def kept(visual: Tensor, share: float) -> Tensor:
    """Which rows are kept: of N visual rows ⌊N · (1 − share)⌋, evenly spaced (Ji et al. 2025, arXiv 2508.16201, §3.2).

    Args:
        visual: int64 [B, L], 0 at text and padding, which are kept.
        share: between 0 and 1.

    Returns:
        bool [B, L].
    """
    stay = visual == 0
    for b, here in enumerate(visual > 0):
        place = here.nonzero()[:, 0]
        budget = int(len(place) * (1 - share) + 1e-6)  # 10 · (1 − 0.9) is 0.999…
        stay[b, place[spaced(len(place), budget, place.device)]] = True
    return stay


def spaced(count: int, wanted: int, device: torch.device) -> Tensor:
    """`wanted` of `count` indices, evenly spaced; two or more include both ends."""
    if wanted <= 0:
        return torch.zeros(0, dtype=torch.long, device=device)
    return torch.linspace(0, count - 1, wanted, device=device, dtype=ops.widest(device)).round().long()
