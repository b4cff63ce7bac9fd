"""From features to a draft: the head that computes logits, the growth of a chain or a tree, and a chain's length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.drafters import static_trees
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.shape import TreeOptions
from mmspec.functional import Linear
from mmspec.kernels import reference as ops
from mmspec.protocols import Around, Proposer, SessionView, Target
from mmspec.session import Session, holding
from mmspec.tree import Expand, chain, grow, marginal
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt, Tree, gather_rows


class TargetHead:
    """Computes the logits of a drafter's features with the target's head, or only with its rows of `vocab`.

    Attributes:
        own: whether the drafter has its own head, whose logits the target does not process.
        ids: [V_d], the target's id of each entry of the logits; None: the ids are the same.
    """

    own = False

    def __init__(self, vocab: DraftVocab | None = None) -> None:
        self.vocab = vocab

    @property
    def ids(self) -> Tensor | None:
        return None if self.vocab is None else self.vocab.ids

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [..., V_d] over the draft vocabulary of features [..., F]."""
        return target.head(hidden) if self.vocab is None else target.head(hidden, self.vocab)

    def to_target(self, ids: Tensor) -> Tensor:
        """Convert ids of the draft vocabulary to the target's."""
        return ids if self.vocab is None else self.vocab.ids[ids]

    def to_draft(self, logits: Tensor) -> Tensor:
        """The target's logits [..., V] restricted to the draft vocabulary."""
        return logits if self.vocab is None else logits[..., self.vocab.ids]


def with_head(drafter: Any, head: TargetHead) -> Any:
    """A copy of the drafter with the same weights and another head."""
    twin = copy(drafter)
    twin.head = head
    return twin


class ModelHead(TargetHead):
    """The head of a draft model, which computes logits over the target's tokens by itself."""

    own = True


class OwnHead(Linear):
    """The drafter's own trained head over a draft vocabulary, with the interface of TargetHead."""

    own, vocab = True, None
    ids: Tensor

    def __init__(self, hidden: int, rows: int) -> None:
        super().__init__(hidden, rows, bias=False)
        self.register_buffer("ids", torch.arange(rows))

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        return self(hidden)  # type: ignore[no-any-return]

    def to_target(self, ids: Tensor) -> Tensor:
        return self.ids[ids]

    def to_draft(self, logits: Tensor) -> Tensor:
        return logits[..., self.ids]


Head = TargetHead | OwnHead


def head_of(hidden: int, rows: int) -> Head:
    """An OwnHead with this many rows; 0: the target's head."""
    return OwnHead(hidden, rows) if rows else TargetHead()


class Grower(Protocol):
    """A drafter that computes a feature for each node (`step`), and logits of the next token from it (`logits`)."""

    @property
    def options(self) -> TreeOptions: ...
    @property
    def head(self) -> Head: ...

    def step(
        self, session: SessionView, target: Target, tokens: Tensor, f: Tensor, appended: int, ahead: Tensor,
        seen: Tensor | None, level: int,
    ) -> Tensor:  # fmt: skip
        """Features [B, n, F] of nodes of one level.

        Args:
            tokens: [B, n], the target's ids.
            f: [B, n, F], of their parents.
            appended: number of nodes below the root in earlier levels.
            ahead: [1], `level` − 1, as a tensor.
            seen: bool [B, n, ≥ appended + n]; the last columns mark which of these nodes are ancestors of each, itself
                included; None: all of them.
            level: depth below the root, from 1.
        """

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [..., V_d] over the draft vocabulary from features [..., F]."""

    def levels(self, session: SessionView, target: Target, f: Tensor) -> Tensor | None:
        """Logits [B, depth, V_d] of the tokens at all levels below the root, from its feature f [B, 1, F], if they do
        not depend on the draft's tokens; None: each level needs a step."""

    def at_level(self, f: Tensor, level: int | Tensor) -> Tensor:
        """The input of the head, from the output of `step` for nodes of a level."""


class Stepwise:
    """What growers share whose levels each need a step."""

    options: TreeOptions

    @property
    def nodes(self) -> int:
        return self.options.size

    def levels(self, session: SessionView, target: Target, f: Tensor) -> Tensor | None:
        return None

    def at_level(self, f: Tensor, level: int | Tensor) -> Tensor:
        return f


def draws(options: TreeOptions, session: SessionView) -> int:
    """V of p if the next draft is drawn at random, else 0; it never is if p is a point mass (greedy, seed-exact)."""
    p = session.last.scores.p if options.draws else None
    return 0 if p is None or p.is_point or p.logits is None else p.logits.shape[-1]


def grown(drafter: Grower, session: SessionView, target: Target, f: Tensor, drawn: int) -> Draft:
    """A chain or tree by the drafter's options, from the feature f [B, 1, F] of the root."""
    o, q = drafter.options, None
    if o.tree == static_trees.CHAIN and not drawn:
        below, tree = _chain(drafter, session, target, f)
    else:
        first, expand = _growth(drafter, session, target, f)
        below, tree, q = filled(o, drafter.head, first, expand, gumbel(session, first.shape[-1]) if drawn else None)
    return Draft(torch.cat([session.pending[:, None], below], 1), tree, None if q is None else Categorical(q))


Noise = Callable[[int], Tensor]  # level → Gumbel noise [B, 1, V_d]


def gumbel(session: SessionView, tokens: int | Tensor) -> Noise:
    """The noise that draws from these tokens, as in `ops.gumbel`, at each level below the root."""
    seeds = ops.stream(session.seeds, ops.FRESH)
    return lambda level: ops.gumbel(seeds, session.emitted[:, None] + level, tokens)


def filled(
    o: TreeOptions, head: Head, first: Tensor, expand: Expand, noise: Noise | None
) -> tuple[Tensor, Tree, Tensor | None]:
    """The target's ids [B, N − 1] below the root, the tree, and the logits of each token's distribution if drawn."""
    q = None
    if o.tree == static_trees.DYNAMIC:
        size = min(o.size, 1 + o.width + (o.depth - 1) * o.width**2)
        below, tree = grow(first, expand, o.width, o.depth, size)
    else:
        plan = static_trees.plan(o.tree, o.depth, first.device)
        below, q = static_trees.fill(first, expand, plan, noise)
        tree = plan.tree.expand(len(first))
    if head.ids is not None:
        below = torch.where(below == NO_TOKEN, NO_TOKEN, head.to_target(below.clamp(min=0)))
    return below, tree, q


@dataclass
class _Frontier:
    """The state of a growth: the last level's features, and the ancestors of its nodes."""

    hidden: Tensor  # [B, k, F]
    seen: Tensor  # bool [B, k, M], the ancestors among the appended nodes, which are the last columns
    appended: int = 0
    level: int = 0


def weighed(drafter: Grower, session: SessionView, target: Target, f: Tensor, level: int | Tensor) -> Tensor:
    """Logits [B, n, V] of the tokens `level` levels below the root's children, processed by `Target.weigh`."""
    logits = drafter.logits(drafter.at_level(f, level), target)
    if not target.weighs or drafter.head.own:
        return logits
    return target.weigh(logits, session, session.emitted[:, None] + level)


def _chain(drafter: Grower, session: SessionView, target: Target, f: Tensor) -> tuple[Tensor, Tree]:
    depth, tokens, head = drafter.options.depth, [], drafter.head
    if (levels := drafter.levels(session, target, f)) is not None:
        return head.to_target(levels.argmax(-1)), chain(depth + 1, f.device).expand(len(f))
    ahead = torch.arange(depth, device=f.device).split(1)
    for level in range(depth):
        tokens.append(head.to_target(weighed(drafter, session, target, f, level).argmax(-1)))  # [B, 1]
        if level + 1 < depth:
            f = drafter.step(session, target, tokens[-1], f, level, ahead[level], None, level + 1)
    return torch.cat(tokens, 1), chain(depth + 1, f.device).expand(len(f))


def _growth(drafter: Grower, session: SessionView, target: Target, f: Tensor) -> tuple[Tensor, Expand]:
    """Log-probabilities [B, V] after the root, and a function that computes those after a frontier."""
    o, depth = drafter.options, drafter.options.depth
    if (levels := drafter.levels(session, target, f)) is not None:
        return marginal(levels.float().log_softmax(-1))
    room = (depth - 1) * o.width if o.tree == static_trees.DYNAMIC else o.size
    ahead = torch.arange(depth, device=f.device).split(1)
    state = _Frontier(f, torch.zeros(len(f), 1, room, dtype=torch.bool, device=f.device))

    def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
        k, n = tokens.shape[1], state.appended
        before, seen = gather_rows(state.hidden, came_from), gather_rows(state.seen, came_from)
        own = torch.eye(k, dtype=torch.bool, device=f.device).expand(len(f), k, k)
        state.seen = torch.cat([seen[:, :, k:], own], 2)
        ids, here = drafter.head.to_target(tokens), ahead[state.level]
        state.hidden = drafter.step(session, target, ids, before, n, here, state.seen, state.level + 1)
        state.appended, state.level = n + k, state.level + 1
        return weighed(drafter, session, target, state.hidden, state.level).float().log_softmax(-1)

    return weighed(drafter, session, target, f, 0)[:, 0].float().log_softmax(-1), expand


# -- chains of adaptive length -----------------------------------------------------------------------------------------

CHAIN_LENGTHS = 3  # number of chain lengths: the longest, half of it and a quarter of it


def chain_lengths(depth: int) -> list[int]:
    """The chain lengths for a maximum of `depth` tokens, ascending."""
    return sorted({max(1, depth >> i) for i in range(CHAIN_LENGTHS)})


def by_chain_length(drafter: Any) -> dict[int, Any]:
    """Copies of the drafter for each length, with the same weights."""
    by_depth = {}
    for depth in chain_lengths(drafter.options.depth):
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
