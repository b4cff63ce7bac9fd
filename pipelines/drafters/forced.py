"""Tokens that a grammar forces as drafts, beside those of any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.host.processors.grammar import Parse
from mmspec.protocols import Drafter, Target
from mmspec.session import Row, Session
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft, Prompt

ROOM = 16  # forced tokens of a round at most
STEP = 4  # by which drafts become longer, so that there are few shapes


def parse_of(row: Row) -> Parse | None:
    """Where a row's grammar has come to; None: it has none."""
    process = getattr(getattr(row.request, "sampler", None), "process", None)
    grammar = getattr(process, "grammar", None)
    return None if grammar is None else grammar.parse(row)


def beside(drafter: Drafter, rows: Sequence[Row]) -> Any:
    """The drafter; with forced tokens beside its own where any of the rows has a grammar."""
    return Forced(drafter) if any(parse_of(row) is not None for row in rows) else drafter


class Forced:
    """Where the grammar forces a row's next tokens, these are its draft; else they follow its drafter's best path.

    They are point masses, verified as all drafts are, so that nothing about the output depends on them. The drafter's
    nodes keep their numbers and parents; what is forced stands behind them, or in a chain in their places.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.features, self.nodes = drafter.features, drafter.nodes + ROOM

    def start(self, session: Session, target: Target, prompt: Prompt) -> Any:
        return self.drafter.start(session, target, prompt)

    def propose(self, session: Session, target: Target) -> Draft:
        draft = self.drafter.propose(session, target)
        tokens, parents = draft.tokens.tolist(), draft.tree.parents.tolist()
        found = [_more(row, t, p) for row, t, p in zip(session.rows, tokens, parents, strict=True)]
        if not any(forced for _, forced in found):
            return draft
        return (_longer if draft.tree.is_chain else _branched)(draft, tokens, parents, found)


def _more(row: Row, tokens: list[int], parents: list[int]) -> tuple[int, list[int]]:
    """The node behind which tokens are forced, and these; the root before any other."""
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


def _longer(draft: Draft, tokens: list[list[int]], parents: Any, found: list[tuple[int, list[int]]]) -> Draft:
    """A chain whose rows go on with what is forced there."""
    most = max(node + 1 + len(forced) for node, forced in found)
    size = len(tokens[0]) + -(-max(0, most - len(tokens[0])) // STEP) * STEP
    lines = [[*t[: node + 1], *f] if f else t for t, (node, f) in zip(tokens, found, strict=True)]
    return _made(draft, lines, chain(size, draft.tokens.device).expand(len(lines)), found)


def _branched(
    draft: Draft, tokens: list[list[int]], parents: list[list[int]], found: list[tuple[int, list[int]]]
) -> Draft:
    """A tree with what is forced as a branch, alone where it begins at the root."""
    N = len(tokens[0])
    more = -(-max(len(forced) for _, forced in found) // STEP) * STEP
    lines, above = [], []
    for t, p, (node, forced) in zip(tokens, parents, found, strict=True):
        own = [t[0], *[NO_TOKEN] * (N - 1)] if forced and node == 0 else t
        lines.append([*own, *forced])
        above.append([*p, *([node, *range(N, N + more - 1)])])
    return _made(draft, lines, from_parents(torch.tensor(above, device=draft.tokens.device), N + more), found)


def _made(draft: Draft, lines: list[list[int]], tree: Any, found: list[tuple[int, list[int]]]) -> Draft:
    rows = [[*line, *[NO_TOKEN] * (tree.size - len(line))] for line in lines]
    tokens = torch.tensor(rows, device=draft.tokens.device)
    q = None if draft.q is None else Categorical(_points(draft, tokens, found))
    return replace(draft, tokens=tokens, tree=tree, q=q)


def _points(draft: Draft, tokens: Tensor, found: list[tuple[int, list[int]]]) -> Tensor:
    """Logits of q [B, N, V]: as they were, and point masses on what is new."""
    assert draft.q is not None and draft.q.logits is not None
    logits = pad(draft.q.logits, (0, 0, 0, tokens.shape[1] - draft.tokens.shape[1]))
    old = pad(draft.tokens, (0, tokens.shape[1] - draft.tokens.shape[1]), value=NO_TOKEN)
    points = Categorical(ids=tokens).spread(logits)
    assert points.logits is not None
    return torch.where((tokens == old)[..., None], logits, points.logits)
