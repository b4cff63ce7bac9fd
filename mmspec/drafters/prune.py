"""Pruning without training: which of a prompt's visual rows a drafter reads, by what the target looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.drafters.options import TreeOptions
from mmspec.kernels import reference as ops
from mmspec.types import gather_rows

MASS = 0.4  # share of the attention that the first choice covers; the published scripts' λ


def by_attention(options: TreeOptions) -> bool:
    """Whether what the target looked at is asked for."""
    return options.prune > 0 and options.prune_by == "attention"


def pruned(options: TreeOptions, attention: Tensor | None, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a drafter's `encode_prompt` is given, without the visual rows that the options leave out; positions stay.

    Args:
        attention: [B, L], how much the prompt's text attends to each token, as the target recorded it.
        given: embeds, features, visual, valid and positions, [B, L, …] each.

    Raises:
        ValueError: pruning by attention, which the target did not record.
    """
    if not options.prune:
        return given
    if by_attention(options) and attention is None:
        raise ValueError("this target does not tell what it attends to; prune_by='uniform' works without")
    embeds, features, visual, valid, positions = given
    stay = valid & kept(visual * valid, options.prune, attention if by_attention(options) else None)
    most = int(stay.sum(1).max())
    order = stay.to(torch.uint8).argsort(dim=1, stable=True)[:, stay.shape[1] - most :]  # padding comes first
    return tuple(gather_rows(t, order) for t in (embeds, features, visual, stay, positions))


def kept(visual: Tensor, share: float, attention: Tensor | None) -> Tensor:
    """Which rows stay when a share of each prompt's visual ones is left out (Ji et al. 2025, arXiv 2508.16201, §3.2).

    Of N visual rows ⌊N · (1 − share)⌋ stay: first those that receive most attention, until they cover `MASS` of it,
    then as many of the others, evenly spaced. The paper averages over all layers of a target of the drafter's own kind.

    Args:
        visual: int64 [B, L], 0 at text and padding, which stay.
        share: between 0 and 1.
        attention: [B, L], how much attention each row receives; None: evenly spaced rows alone.

    Returns:
        bool [B, L].
    """
    stay = visual == 0
    for b, here in enumerate(visual > 0):
        place = here.nonzero()[:, 0]
        budget = int(len(place) * (1 - share) + 1e-6)  # 10 · (1 − 0.9) is 0.999…
        chosen = torch.zeros(len(place), dtype=torch.bool, device=visual.device)
        if attention is not None:
            chosen[attended(attention[b, place], budget)] = True
        rest = (~chosen).nonzero()[:, 0]
        chosen[rest[spaced(len(rest), budget - int(chosen.sum()), rest.device)]] = True
        stay[b, place[chosen]] = True
    return stay


def attended(scores: Tensor, budget: int) -> Tensor:
    """The fewest of `scores` [N] that add up to `MASS` of their sum, but at most `budget`; indices, best first."""
    best, order = scores.to(ops.widest(scores.device)).sort(descending=True, stable=True)
    covered = best.cumsum(0)
    enough = int((covered < MASS * covered[-1:]).sum()) + 1 if len(scores) else 0
    return order[: min(enough, budget)]


def spaced(count: int, wanted: int, device: torch.device) -> Tensor:
    """`wanted` of `count` indices, evenly spaced, both ends among them where there are two."""
    if wanted <= 0:
        return torch.zeros(0, dtype=torch.long, device=device)
    return torch.linspace(0, count - 1, wanted, device=device, dtype=ops.widest(device)).round().long()
