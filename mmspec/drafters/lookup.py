"""Prompt lookup beside another drafter: a row's own text is copied where that promises more than its drafts gain."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.drafters.extended import extended
from mmspec.drafters.ngram import Index
from mmspec.drafters.static_trees import CHAIN
from mmspec.protocols import Around, Proposer, Target
from mmspec.session import Session, holding
from mmspec.types import Draft, Prompt

LENGTH = 7  # tokens that are copied at most
LEAST = 0.2  # how likely a copied token has to be
EDGE = 1.1  # how many times the gain of a usual draft a copy has to promise: it may have more nodes
_USUAL, _DOUBT = 2.0, 4.0  # tokens a round that a drafter is taken to gain, and the rounds that this is worth


@dataclass
class RowText:
    """The text of a row, and what its drafter gained.

    Attributes:
        index: of its text.
        gained: tokens of the rounds that its drafter drafted.
        rounds: of these, the number.
        copied: its last draft was a copy.
    """

    index: Index = field(default_factory=Index)
    gained: float = _USUAL * _DOUBT
    rounds: float = _DOUBT
    copied: bool = False


class Lookup:
    """Proposes what a drafter proposes, or what followed the end of the row's text when it stood there before.

    Which of the two is chosen by the row's own text before anything is drafted, so that the accepted tokens have the
    target's distribution, and a row's text depends on no other row (Saxena 2023 copies alone; here it is the second
    choice of a drafter that learned).

    Args:
        drafter: what drafts otherwise.
        brief: the same with the least that it can draft, for rounds in which all rows copy: it still reads what was
            decided.
    """

    def __init__(self, drafter: Proposer, brief: Proposer) -> None:
        self.drafter, self.brief = drafter, brief
        self.features, self.nodes = drafter.features, max(drafter.nodes, 1 + LENGTH)

    def start(self, session: Session, target: Target, prompt: Prompt) -> Around[RowText]:
        return Around(self.drafter.start(session, target, prompt), [RowText() for _ in session.rows])

    def propose(self, session: Session, target: Target) -> Draft:
        memory: Around[RowText] = session.memory
        lines = []
        for row, known, count in zip(session.rows, memory.values, session.last.counts, strict=True):
            if not known.copied and row.generated > 1:
                known.gained, known.rounds = known.gained + count, known.rounds + 1
            text, promises = known.index.follow(row.tokens, LENGTH)
            sure = sum(promises[i + 1] - promises[i] >= LEAST for i in range(len(text)))
            known.copied = sure > 0 and promises[sure] > EDGE * known.gained / known.rounds
            lines.append((0, text[:sure] if known.copied else []))
        drafter = self.brief if all(known.copied for known in memory.values) else self.drafter
        with holding(session, memory.inner):
            draft = drafter.propose(session, target)
        return extended(draft, lines)


def brief(drafter: Any) -> Any:
    """The drafter with the least that it can draft, of the same weights and memory."""
    made = copy(drafter)
    made.options = replace(drafter.options, depth=1, width=1, size=2, tree=CHAIN, adaptive=False)
    return made
