"""Drafts the tokens that a grammar forces, in addition to the tokens of any drafter."""

from __future__ import annotations

from collections.abc import Sequence

from mmspec.drafters.lookup import Line, extended
from mmspec.pipelines.host.processors.grammar import Parse
from mmspec.protocols import Proposer, Target
from mmspec.session import Row, Session
from mmspec.types import NO_TOKEN, Draft, Prompt

ROOM = 16  # the maximum number of forced tokens in a round


def parse_of(row: Row) -> Parse | None:
    """The state of a row's grammar; None: it has no grammar."""
    grammar = getattr(getattr(row.request, "processors", None), "grammar", None)
    return None if grammar is None else grammar.parse(row)


def with_forced(drafter: Proposer, rows: Sequence[Row]) -> Proposer:
    """The drafter, wrapped in Forced if any of the rows has a grammar."""
    return Forced(drafter) if any(parse_of(row) is not None for row in rows) else drafter


class Forced:
    """Drafts the tokens that the grammar forces next for a row; if there are none, those forced after its best path.

    They are point masses, and verified like all drafts, so the output does not depend on them. The drafter's nodes keep
    their indices and parents; forced tokens come after them, or replace them by a chain.
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
        return extended(draft, forced)


def _more(row: Row, tokens: list[int], parents: list[int]) -> Line:
    """The forced tokens of a row, and the node that they follow: the root, else the end of the best allowed path."""
    parse, text = parse_of(row), row.tokens[row.start :]
    if parse is None:
        return 0, []
    node, forced = 0, parse.forced(text, ROOM)
    if forced:
        return 0, forced
    for n in range(1, len(tokens)):
        if parents[n] == node and tokens[n] != NO_TOKEN and parse.may_go([*text, tokens[n]]):
            node, text = n, [*text, tokens[n]]
    return node, parse.forced(text, ROOM)
