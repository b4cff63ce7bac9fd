"""Prompt lookup beside another drafter: inserts copies of a row's own text where they promise more than it gains."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.drafters.ngram import Index
from mmspec.drafters.static_trees import CHAIN
from mmspec.protocols import Around, Proposer, Target
from mmspec.session import Session, holding
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt

LENGTH = 7  # largest number of copied tokens
LEAST = 0.2  # smallest probability of a copied token
EDGE = 1.1  # a copy must promise this many times the drafter's average gain, since it may have more nodes
_USUAL, _DOUBT = 2.0, 4.0  # prior of the drafter's gain in tokens a round, and its weight in rounds
STEP = 4  # drafts grow in multiples of this, so that there are few shapes

Line = tuple[int, list[int]]  # a node, and the tokens to insert after it


@dataclass
class RowText:
    """The n-gram index of a row's text, and the gain of its drafter.

    Attributes:
        index: of its text.
        gained: tokens gained in the rounds that the drafter drafted.
        rounds: the number of these rounds.
        copied: whether its last draft was a copy.
    """

    index: Index = field(default_factory=Index)
    gained: float = _USUAL * _DOUBT
    rounds: float = _DOUBT
    copied: bool = False


class Lookup:
    """Proposes a drafter's draft, or what followed an earlier occurrence of the end of the row's text.

    The choice depends on the row's own text and is made before anything is drafted, so that the accepted tokens have
    the target's distribution, and a row's text does not depend on other rows (Saxena 2023 only copies; here copying
    complements a trained drafter).

    Args:
        drafter: drafts for the rows that do not copy.
        brief: the same drafter with its smallest draft, for rounds in which all rows copy: it must still read the
            accepted tokens.
    """

    def __init__(self, drafter: Proposer, brief: Proposer) -> None:
        self.drafter, self.brief = drafter, brief
        self.features, self.nodes = drafter.features, max(drafter.nodes, 1 + LENGTH)

    def start(self, session: Session, target: Target, prompt: Prompt) -> Around[RowText]:
        return Around(self.drafter.start(session, target, prompt), [RowText() for _ in session.rows])

    def propose(self, session: Session, target: Target) -> Draft:
        memory: Around[RowText] = session.memory
        lines = []
        for row, state, count in zip(session.rows, memory.values, session.last.counts, strict=True):
            if not state.copied and row.generated > 1:
                state.gained, state.rounds = state.gained + count, state.rounds + 1
            text, promises = state.index.follow(row.tokens, LENGTH)
            likely = sum(promises[i + 1] - promises[i] >= LEAST for i in range(len(text)))
            state.copied = likely > 0 and promises[likely] > EDGE * state.gained / state.rounds
            lines.append((0, text[:likely] if state.copied else []))
        drafter = self.brief if all(state.copied for state in memory.values) else self.drafter
        with holding(session, memory.inner):
            draft = drafter.propose(session, target)
        return extended(draft, lines)


def brief(drafter: Any) -> Any:
    """A copy of the drafter that drafts one token, with the same weights and memory."""
    twin = copy(drafter)
    twin.options = replace(drafter.options, depth=1, width=1, size=2, tree=CHAIN, adaptive=False)
    return twin


def extended(draft: Draft, lines: Sequence[Line]) -> Draft:
    """The draft with each row's line after the node that it names; after the root it replaces the row's whole draft.

    Inserted tokens are point masses, even if the drafter drew the same token. In a chain they replace what followed the
    node; the nodes of a tree keep their numbers and parents. A row with an empty line does not change.
    """
    if not any(line for _, line in lines):
        return draft
    device, N = draft.tokens.device, draft.tree.size
    # for each row the number of its nodes that stay, and the node where its line begins
    stay = [node + 1 if line and (draft.tree.is_chain or node == 0) else N for node, line in lines]
    if draft.tree.is_chain:
        begins, longest = stay, max(node + 1 + len(line) for node, line in lines)
        tree = chain(N + -(-max(0, longest - N) // STEP) * STEP, device).expand(len(lines))
    else:
        begins, more = [N] * len(lines), -(-max(len(line) for _, line in lines) // STEP) * STEP
        below = torch.tensor([[node, *range(N, N + more - 1)] for node, _ in lines], device=device)
        tree = from_parents(torch.cat([draft.tree.parents, below], 1), N + more)
        if (old := draft.tree.families) is not None:  # a node has one child more, and those of the line have one each
            tree = replace(tree, families=(sum(old[:1]) + more, *(count + 1 for count in old[1:]), 1))
    size = tree.size
    rows = [
        [*[NO_TOKEN] * begin, *line, *[NO_TOKEN] * (size - begin - len(line))]
        for begin, (_, line) in zip(begins, lines, strict=True)
    ]
    own = torch.arange(size, device=device) < torch.tensor(stay, device=device)[:, None]
    tokens = torch.where(own, pad(draft.tokens, (0, size - N)), torch.tensor(rows, device=device))
    q = None if draft.q is None else Categorical(_points(draft.q, tokens, own))
    return replace(draft, tokens=tokens, tree=tree, q=q)


def _points(q: Categorical, tokens: Tensor, own: Tensor) -> Tensor:
    """Logits [B, N, V]: those of q at the draft's `own` nodes, bool [B, N], and point masses on the other tokens."""
    assert q.logits is not None
    logits = pad(q.logits, (0, 0, 0, tokens.shape[1] - q.logits.shape[1]))
    points = Categorical(ids=tokens).spread(logits)
    assert points.logits is not None
    return torch.where(own[..., None], logits, points.logits)
