"""Chains of adaptive length: longer after a fully accepted draft, shorter after one that was mostly rejected."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from mmspec.protocols import Around, Proposer, Target
from mmspec.session import Session, holding
from mmspec.types import NO_TOKEN, Draft, Prompt

LENGTHS = 3  # number of chain lengths: the longest, half of it and a quarter of it


def lengths(depth: int) -> list[int]:
    """The chain lengths for a maximum of `depth` tokens, ascending."""
    return sorted({max(1, depth >> i) for i in range(LENGTHS)})


def variants(drafter: Any) -> dict[int, Any]:
    """Copies of the drafter for each length, with the same weights."""
    by_depth = {}
    for depth in lengths(drafter.options.depth):
        by_depth[depth] = copy(drafter)
        by_depth[depth].options = replace(drafter.options, depth=depth, size=depth + 1)
    return by_depth


class Adaptive:
    """Proposes chains of one of a few lengths: doubled after a row's draft was accepted whole, halved after most of it
    was rejected.

    The length is chosen before any token of the draft is known, so the accepted tokens have the target's distribution.
    Under sampling it depends only on the row's own last drafts, so that a row's text does not depend on other rows;
    greedy rows share the median length.

    Args:
        by_depth: the same drafter for each length, whose memory does not depend on the length.
    """

    def __init__(self, by_depth: Mapping[int, Proposer]) -> None:
        self.by_depth = dict(sorted(by_depth.items()))
        self.drafter = self.by_depth[max(by_depth)]
        self.features, self.nodes = self.drafter.features, self.drafter.nodes

    def start(self, session: Session, target: Target, prompt: Prompt) -> Around[int]:
        first = list(self.by_depth)[len(self.by_depth) // 2]
        return Around(self.drafter.start(session, target, prompt), [first] * len(session.rows))

    def propose(self, session: Session, target: Target) -> Draft:
        memory: Around[int] = session.memory
        last = session.last
        memory.values = [
            self._next(depth, count - 1, proposed)
            for depth, count, proposed in zip(memory.values, last.counts, last.proposed, strict=True)
        ]
        greedy = last.scores.p.is_point  # then rows may share a length, since it does not change the output
        depth = sorted(memory.values)[(len(memory.values) - 1) // 2] if greedy else max(memory.values)
        with holding(session, memory.inner):
            draft = self.by_depth[depth].propose(session, target)
        if greedy or min(memory.values) == depth:
            return draft
        own = torch.tensor(memory.values, device=draft.tokens.device)
        return replace(draft, tokens=draft.tokens.masked_fill(draft.tree.depth > own[:, None], NO_TOKEN))

    def _next(self, depth: int, accepted: int, proposed: int) -> int:
        """The length after a draft with `accepted` of `proposed` tokens; unchanged if nothing was proposed."""
        depths = list(self.by_depth)
        place = depths.index(depth)
        if proposed and accepted >= depth:
            return depths[min(place + 1, len(depths) - 1)]
        return depths[max(place - 1, 0)] if 2 * accepted < proposed else depth
