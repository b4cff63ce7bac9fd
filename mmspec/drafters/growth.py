"""Growing a chain or a tree, level by level, from what a drafter makes of each node; chains of adaptive length."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters import static_trees
from mmspec.drafters.draft_vocab import Head
from mmspec.drafters.shape import TreeOptions
from mmspec.kernels import reference as ops
from mmspec.protocols import Drafter, SessionView, Target, reported
from mmspec.tree import Expand, chain, grow, marginal
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt, Tree, gather_rows

LENGTHS = 3  # that a chain of adaptive length may have: the longest, half of it and a quarter of it


@dataclass
class _Frontier:
    """Growth under way: the last level's features, and who is whose ancestor since the root."""

    hidden: Tensor  # [B, k, F]
    seen: Tensor  # bool [B, k, M], in its last columns what was appended
    appended: int = 0
    level: int = 0


class Growth:
    """A drafter that makes a feature of every node it proposes; it says how (`step`) and what follows it (`logits`)."""

    options = TreeOptions()  # of an instance: its own
    head: Head

    @property
    def nodes(self) -> int:
        """Nodes of a draft at most, the root included."""
        return self.options.size

    def step(
        self, session: SessionView, target: Target, tokens: Tensor, f: Tensor, appended: int, ahead: Tensor,
        seen: Tensor | None, level: int,
    ) -> Tensor:  # fmt: skip
        """Features [B, n, F] of nodes of one level.

        Args:
            tokens: [B, n], the target's ids.
            f: [B, n, F], of their parents.
            appended: how many nodes below the root came before them.
            ahead: [1], `level` − 1, as a tensor.
            seen: bool [B, n, ≥ appended + n], in its last columns which of all these nodes each counts among its
                ancestors, itself included; None: all of them.
            level: how deep below the root they stand, from 1.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [..., V_d] over the draft vocabulary from features [..., F]."""
        raise NotImplementedError

    def levels(self, session: SessionView, target: Target, f: Tensor) -> Tensor | None:
        """Logits [B, depth, V_d] of the tokens at all levels below the root, from its feature f [B, 1, F], where they
        depend on no token of the draft; None: every level is a step."""
        return None

    def at_level(self, f: Tensor, level: int | Tensor) -> Tensor:
        """Of what `step` gave for nodes of a level, the feature that stands before the head."""
        return f

    def drawing(self, session: SessionView) -> bool:
        """Whether the next draft is drawn at random; where p is a point mass (greedy, seed-exact) it is not."""
        return self.options.draws and not session.last.scores.p.is_point

    def grown(self, session: SessionView, target: Target, f: Tensor, draws: bool) -> Draft:
        """What the options ask for, from the feature f [B, 1, F] of the root."""
        o, q = self.options, None
        if o.tree == static_trees.DYNAMIC:
            below, tree = self._tree(session, target, f)
        elif o.tree == static_trees.CHAIN and not draws:
            below, tree = self._chain(session, target, f)
        else:
            below, tree, q = self._static(session, target, f, draws)
        return Draft(torch.cat([session.pending[:, None], below], 1), tree, q)

    def _weighed(self, session: SessionView, target: Target, f: Tensor, level: int | Tensor) -> Tensor:
        """Logits [B, n, V] of the tokens at `level` below the root's children, weighed as the target weighs its own."""
        logits = self.logits(self.at_level(f, level), target)
        if not target.weighs or self.head.own:
            return logits
        return target.weigh(logits, session, session.emitted[:, None] + level)

    def _chain(self, session: SessionView, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        depth, tokens = self.options.depth, []
        if (levels := self.levels(session, target, f)) is not None:
            return self.head.to_target(levels.argmax(-1)), chain(depth + 1, f.device).expand(len(f))
        ahead = torch.arange(depth, device=f.device).split(1)
        for level in range(depth):
            tokens.append(self.head.to_target(self._weighed(session, target, f, level).argmax(-1)))  # [B, 1]
            if level + 1 < depth:
                f = self.step(session, target, tokens[-1], f, level, ahead[level], None, level + 1)
        return torch.cat(tokens, 1), chain(depth + 1, f.device).expand(len(f))

    def _tree(self, session: SessionView, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
        o = self.options
        size = min(o.size, 1 + o.width + (o.depth - 1) * o.width**2)
        first, expand = self._growth(session, target, f)
        below, tree = grow(first, expand, o.width, o.depth, size)
        return self.head.to_target(below), tree

    def _static(
        self, session: SessionView, target: Target, f: Tensor, draws: bool
    ) -> tuple[Tensor, Tree, Categorical | None]:
        """A static tree, and the distribution of what was drawn."""

        def noise(level: int) -> Tensor:
            return ops.gumbel(seeds, session.emitted[:, None] + level, first.shape[-1])

        plan = static_trees.plan(self.options.tree, self.options.depth, f.device)
        seeds = ops.stream(session.seeds, ops.FRESH)
        first, expand = self._growth(session, target, f)
        below, q = static_trees.fill(first, expand, plan, noise if draws else None)
        return self.head.to_target(below), plan.tree.expand(len(f)), None if q is None else Categorical(q)

    def _growth(self, session: SessionView, target: Target, f: Tensor) -> tuple[Tensor, Expand]:
        """Log-probabilities [B, V] after the root, and the way to those after a frontier."""
        o, depth = self.options, self.options.depth
        if (levels := self.levels(session, target, f)) is not None:
            return marginal(levels.float().log_softmax(-1))
        room = (depth - 1) * o.width if o.tree == static_trees.DYNAMIC else self.nodes
        ahead = torch.arange(depth, device=f.device).split(1)
        state = _Frontier(f, torch.zeros(len(f), 1, room, dtype=torch.bool, device=f.device))

        def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
            k, n = tokens.shape[1], state.appended
            before, seen = gather_rows(state.hidden, came_from), gather_rows(state.seen, came_from)
            own = torch.eye(k, dtype=torch.bool, device=f.device).expand(len(f), k, k)
            state.seen = torch.cat([seen[:, :, k:], own], 2)
            ids, here = self.head.to_target(tokens), ahead[state.level]
            state.hidden = self.step(session, target, ids, before, n, here, state.seen, state.level + 1)
            state.appended, state.level = n + k, state.level + 1
            return self._weighed(session, target, state.hidden, state.level).float().log_softmax(-1)

        return self._weighed(session, target, f, 0)[:, 0].float().log_softmax(-1), expand


# -- chains of adaptive length ----------------------------------------------------------------------------------------


def lengths(depth: int) -> list[int]:
    """Those of chains of up to `depth` tokens, from the shortest."""
    return sorted({max(1, depth >> i) for i in range(LENGTHS)})


def variants(drafter: Any) -> dict[int, Any]:
    """The drafter at each length, with the same weights."""
    found = {}
    for depth in lengths(drafter.options.depth):
        found[depth] = copy(drafter)
        found[depth].options = replace(drafter.options, depth=depth, size=depth + 1)
    return found


@dataclass
class _Lengths:
    """The drafter's memory of some rows, and how long the next draft of each is."""

    inner: Any
    depths: list[int]

    @property
    def stats(self) -> dict[str, float]:
        return reported(self.inner)

    def select(self, rows: Tensor) -> _Lengths:
        return _Lengths(
            None if self.inner is None else self.inner.select(rows), [self.depths[i] for i in rows.tolist()]
        )

    def join(self, other: _Lengths) -> _Lengths:
        return _Lengths(None if self.inner is None else self.inner.join(other.inner), self.depths + other.depths)


class Adaptive:
    """Proposes chains of one of a few lengths: doubled for a row whose draft was accepted whole, halved where most was
    rejected.

    The length is chosen before any token of the draft is known, so the accepted tokens have the target's distribution.
    Where tokens are drawn, it depends on the row's own last drafts only, so that a row's text depends on no other row;
    greedy rows share the median length.

    Args:
        by_depth: the same drafter at each length, with a memory that knows nothing of lengths.
    """

    def __init__(self, by_depth: Mapping[int, Drafter]) -> None:
        self.by_depth = dict(sorted(by_depth.items()))
        self.drafter = self.by_depth[max(by_depth)]
        self.features, self.nodes = self.drafter.features, self.drafter.nodes

    def start(self, session: SessionView, target: Target, prompt: Prompt) -> _Lengths:
        usual = list(self.by_depth)[len(self.by_depth) // 2]
        return _Lengths(self.drafter.start(session, target, prompt), [usual] * len(session.rows))

    def propose(self, session: SessionView, target: Target) -> Draft:
        memory: _Lengths = session.memory
        last = session.last
        memory.depths = [
            self._next(depth, count - 1, proposed)
            for depth, count, proposed in zip(memory.depths, last.counts, last.proposed, strict=True)
        ]
        greedy = last.scores.p.is_point  # then neighbours may share a length: no length changes what is decided
        depth = sorted(memory.depths)[(len(memory.depths) - 1) // 2] if greedy else max(memory.depths)
        session.memory = memory.inner
        try:
            draft = self.by_depth[depth].propose(session, target)
        finally:
            session.memory = memory
        if greedy or min(memory.depths) == depth:
            return draft
        own = torch.tensor(memory.depths, device=draft.tokens.device)
        return replace(draft, tokens=draft.tokens.masked_fill(draft.tree.depth > own[:, None], NO_TOKEN))

    def _next(self, depth: int, accepted: int, proposed: int) -> int:
        """The next length after a draft of which so many tokens were accepted; unchanged where nothing was proposed."""
        depths = list(self.by_depth)
        place = depths.index(depth)
        if proposed and accepted >= depth:
            return depths[min(place + 1, len(depths) - 1)]
        return depths[max(place - 1, 0)] if 2 * accepted < proposed else depth
