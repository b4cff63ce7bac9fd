"""Captured and compiled drafts: reading the accepted tokens and all levels of a draft are one function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.compile.capture import PiecewiseFunction, Uncapturable
from mmspec.compile.capture_cache import CaptureCache
from mmspec.drafters import static_trees
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.growth import draws
from mmspec.drafters.memory import FeatureMemory
from mmspec.kernels import reference as ops
from mmspec.modes import lasting
from mmspec.protocols import SessionView, Target
from mmspec.session import Row
from mmspec.tree import bounds, chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Decided, Draft, Prompt, Round, Tree, decided

_TIE = 1e-3  # tolerance for rounding in the score (log-probability plus noise) of a drawn token


Capturable = FeatureDrafter | BlockDrafter  # their drafts depend only on tensors and attentions over their memory


@dataclass
class _Within:
    """The session of a draft that is being captured: tensors only, no state of the host."""

    pending: Tensor
    emitted: Tensor
    seeds: Tensor
    memory: FeatureMemory  # from `FeatureMemory.passing`
    rows: Sequence[Row] = ()

    @property
    def last(self) -> Round:
        raise Uncapturable("its draft reads the last round on the host")


class CapturedDraft:
    """A drafter whose drafts are captured; the uncaptured drafter proposes if the target weighs its logits.

    Args:
        drafter: fitted to the target.
        weights: of the target, whose embedding and head the drafter uses.
        vocab: rows of that head.
        captures: of this drafter's layer and these weights. A capture is used after `check` has accepted its draft.
        depths: depths of the adaptive chains of these rows, each of which has a capture; none: only this drafter's.
    """

    def __init__(
        self, drafter: Capturable, weights: Callable[[], Iterable[Tensor]], vocab: int, captures: CaptureCache,
        depths: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.drafter, self.weights, self.vocab, self.captures = drafter, weights, vocab, captures
        self.features, self.nodes = drafter.features, drafter.nodes
        # possible numbers of accepted nodes that a capture is padded to
        self.most = sorted(1 + depth for depth in (depths or [drafter.options.depth]))

    def start(self, session: SessionView[FeatureMemory], target: Target, prompt: Prompt) -> FeatureMemory:
        self.captures.check(self.drafter, *target.tables)
        if self.drafter.head.vocab is not None:  # copies or updates its rows of the head, which a replay does not
            assert prompt.embeds is not None
            self.drafter.logits(prompt.embeds[:1, :1], target)
        return self.drafter.start(session, target, prompt)

    @torch.no_grad()
    def propose(self, session: SessionView[FeatureMemory], target: Target) -> Draft:
        weighed = target.weighs and not self.drafter.head.own
        rows = next((n for n in self.most if session.last.kept.shape[1] <= n), None)
        if weighed or rows is None:
            return self.drafter.propose(session, target)
        memory = session.memory
        hidden, follow, count, counts = decided(session.last)
        missing = rows - follow.shape[1]  # rows past `count` are not used, and are overwritten
        inputs = [pad(hidden, (0, 0, 0, missing)), pad(follow, (0, missing)), count]
        inputs += [session.pending, session.emitted, session.seeds, *memory.state()]
        after = memory.lengths.plus(counts, count)
        attend = self.drafter.attending(memory, replace(memory, lengths=after), rows)
        o, drawn = self.drafter.options, draws(self.drafter.options, session)
        shape, head = (o.tree, o.depth, o.width, o.size), self.drafter.head
        key = (shape, head.vocab, drawn, target.guidance, *(t.shape for t in inputs))

        def make() -> PiecewiseFunction:
            captured = self._capture(target, drawn, inputs, memory, rows)
            check(self._draft(captured(attend, *inputs)), session, self.vocab)
            return captured

        captured = self.captures.get(key, make)
        if captured is None:
            return self.drafter.propose(session, target)
        draft = self._draft(captured(attend, *inputs))
        memory.lengths, memory.positions = after, memory.positions + count
        return draft

    def _draft(self, tensors: Sequence[Tensor]) -> Draft:
        tokens, parents, depth, ancestors, *distribution = tensors
        o = self.drafter.options
        if o.tree == static_trees.DYNAMIC:
            families: tuple[int, ...] | None = bounds(parents.shape[1], o.width, o.depth)
        else:
            assert o.tree is not None
            families = static_trees.plan(o.tree, o.depth, parents.device).tree.families
        tree = Tree(parents, depth, ancestors, o.tree == "chain", families)
        return Draft(tokens, tree, Categorical(*distribution) if distribution else None)

    def _capture(
        self, target: Target, drawn: int, inputs: list[Tensor], memory: FeatureMemory, rows: int
    ) -> PiecewiseFunction:
        drafter, o, device = self.drafter, self.drafter.options, inputs[0].device
        static = o.tree != static_trees.DYNAMIC
        fixed = [chain(rows, device), static_trees.plan(o.tree, o.depth, device) if static else None]

        def run(hidden: Tensor, follow: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
            pending, emitted, seeds, *rest = state
            path = Decided(hidden, follow, count, (rows,) * len(count))
            with memory.passing(rest) as empty:
                within = _Within(pending, emitted, seeds, cast(FeatureMemory, empty))
                draft = drafter.draft(within, target, path, drawn)
            tree = draft.tree
            return [draft.tokens, tree.parents, tree.depth, tree.ancestors, *_tensors(draft.q and draft.q.logits)]

        own = [*drafter.parameters(), *drafter.buffers(), *self.weights(), *_tensors(fixed)]
        own += [] if drafter.head.vocab is None else drafter.head.vocab.tensors
        with lasting():
            return PiecewiseFunction(run, [t.clone() for t in inputs], own)


def check(draft: Draft, session: SessionView[FeatureMemory], vocab: int) -> None:
    """Check that a captured draft is valid and keeps the output distribution; a bad but valid draft only costs time.

    Tokens chosen by rank may be any tokens, so they are not compared with those of the uncompiled drafter, from which
    they may differ by rounding. Drawn tokens must be those that the session's noise draws from the distribution that
    the draft states.

    Raises:
        Uncapturable: it is not a tree of tokens under the pending one, or was not drawn from its distribution.
    """
    tokens, tree, distribution = draft.tokens, draft.tree, draft.q
    chained = chain(tree.size, tokens.device)
    valid = (tokens >= NO_TOKEN) & (tokens < vocab) & (tokens[:, :1] == session.pending[:, None])
    above = (tree.parents <= chained.parents) & (tree.parents >= (chained.parents if tree.is_chain else 0))
    if not ((valid & above).all() and _same(tree, from_parents(tree.parents, tree.size))):
        raise Uncapturable("its draft would not be a tree of tokens under the pending one")
    if distribution is None or distribution.logits is None:
        return
    places = session.emitted[:, None] + tree.depth[:, 1:] - 1
    score = distribution.logits[:, 1:] + ops.gumbel(
        ops.stream(session.seeds, ops.FRESH), places, distribution.logits.shape[-1]
    )
    drawn = score.gather(2, tokens[:, 1:, None].clamp(min=0))[..., 0]
    if not ((drawn >= score.amax(-1) - _TIE) | (tokens[:, 1:] == NO_TOKEN)).all():  # also if NaN
        raise Uncapturable("its draft would not be drawn from its distribution")


def _same(a: Tree, b: Tree) -> bool:
    return torch.equal(a.depth, b.depth) and torch.equal(a.ancestors, b.ancestors)


def _tensors(value: object) -> list[Tensor]:
    """All tensors inside frozen values."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return [t for part in parts for t in _tensors(part)]
