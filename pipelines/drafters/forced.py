"""Tokens that a grammar forces as drafts, beside those of any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host.processors.grammar import Parse
from mmspec.protocols import Proposer, Target
from mmspec.session import Row, Session
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt, Tree

ROOM = 16  # forced tokens of a round at most
Lists = list[list[int]]  # of each row
Forcing = tuple[int, list[int]]  # the node behind which tokens are forced, and these
STEP = 4  # by which drafts become longer, so that there are few shapes


def parse_of(row: Row) -> Parse | None:
    """Where a row's grammar has come to; None: it has none."""
    process = getattr(getattr(row.request, "sampler", None), "process", None)
    grammar = getattr(process, "grammar", None)
    return None if grammar is None else grammar.parse(row)


def beside(drafter: Proposer, rows: Sequence[Row]) -> Proposer:
    """The drafter; with forced tokens beside its own where any of the rows has a grammar."""
    return Forced(drafter) if any(parse_of(row) is not None for row in rows) else drafter


class Forced:
    """Where the grammar forces a row's next tokens, these are its draft; else they follow its drafter's best path.

    They are point masses, verified as all drafts are, so that nothing about the output depends on them. The drafter's
    nodes keep their numbers and parents; what is forced stands behind them, or in a chain in their places.
    """

    def __init__(self, drafter: Proposer) -> None:
        self.drafter = drafter
        self.features, self.nodes = drafter.features, drafter.nodes + ROOM

    def start(self, session: Session, target: Target, prompt: Prompt) -> object:
        return self.drafter.start(session, target, prompt)

    def propose(self, session: Session, target: Target) -> Draft:
        draft = self.drafter.propose(session, target)
        tokens, parents = draft.tokens.tolist(), draft.tree.parents.tolist()
        forced = [_more(row, t, p) for row, t, p in zip(session.rows, tokens, parents, strict=True)]
        if not any(line for _, line in forced):
            return draft
        return (_longer if draft.tree.is_chain else _branched)(draft, tokens, parents, forced)


def _more(row: Row, tokens: list[int], parents: list[int]) -> Forcing:
    """Of a row; the root before any other node."""
    parse, text = parse_of(row), row.tokens[row.start :]
    if parse is None:
        return 0, []
    node, forced = 0, parse.forced(text, ROOM)
    if forced:
        return 0, forced
    for n in range(1, len(tokens)):
        if parents[n] == node and tokens[n] != NO_TOKEN and parse.go([*text, tokens[n]]):
            node, text = n, [*text, tokens[n]]
    return node, parse.forced(text, ROOM)


def _longer(draft: Draft, tokens: Lists, parents: Lists, forced: list[Forcing]) -> Draft:
    """A chain whose rows go on with what is forced there."""
    most = max(node + 1 + len(line) for node, line in forced)
    size = len(tokens[0]) + -(-max(0, most - len(tokens[0])) // STEP) * STEP
    lines = [[*t[: node + 1], *f] if f else t for t, (node, f) in zip(tokens, forced, strict=True)]
    return _made(draft, lines, chain(size, draft.tokens.device).expand(len(lines)))


def _branched(draft: Draft, tokens: Lists, parents: Lists, forced: list[Forcing]) -> Draft:
    """A tree with what is forced as a branch, alone where it begins at the root."""
    N = len(tokens[0])
    more = -(-max(len(line) for _, line in forced) // STEP) * STEP
    lines, above = [], []
    for t, p, (node, line) in zip(tokens, parents, forced, strict=True):
        own = [t[0], *[NO_TOKEN] * (N - 1)] if line and node == 0 else t
        lines.append([*own, *line])
        above.append([*p, *([node, *range(N, N + more - 1)])])
    return _made(draft, lines, from_parents(torch.tensor(above, device=draft.tokens.device), N + more))


def _made(draft: Draft, lines: Lists, tree: Tree) -> Draft:
    rows = [[*line, *[NO_TOKEN] * (tree.size - len(line))] for line in lines]
    tokens = torch.tensor(rows, device=draft.tokens.device)
    q = None if draft.q is None else Categorical(_points(draft, tokens))
    return replace(draft, tokens=tokens, tree=tree, q=q)


def _points(draft: Draft, tokens: Tensor) -> Tensor:
    """Logits of q [B, N, V]: as they were, and point masses on what is new."""
    assert draft.q is not None and draft.q.logits is not None
    logits = pad(draft.q.logits, (0, 0, 0, tokens.shape[1] - draft.tokens.shape[1]))
    old = pad(draft.tokens, (0, tokens.shape[1] - draft.tokens.shape[1]), value=NO_TOKEN)
    points = Categorical(ids=tokens).spread(logits)
    assert points.logits is not None
    return torch.where((tokens == old)[..., None], logits, points.logits)
