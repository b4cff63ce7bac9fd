"""The loop: propose → verify → accept → commit."""

from __future__ import annotations

from collections.abc import Iterator

from mmspec.accept import along_path
from mmspec.session import Session
from mmspec.tree import lone
from mmspec.types import Drafter, Prompt, Round, Scores, Target


def begin(session: Session, target: Target, drafter: Drafter, prompt: Prompt, scores: Scores) -> Round:
    """The round of the prefill: the prompt's last token is the root of an empty draft, already in the cache."""
    root = lone(prompt.ids[:, -1:])
    round_ = session.commit(root, scores, along_path(root, scores.law, session.rule, session.noise(root, scores.law)))
    session.memory = session.timed("draft", drafter.start, session, target, prompt)
    session.stats.drafter = dict(getattr(session.memory, "told", {}))
    return round_


def decode(session: Session, target: Target, drafter: Drafter) -> Iterator[Round]:
    """Rounds until every row has ended. Rows may be admitted between two rounds; ended rows are let go."""
    session.retire()
    while session.rows:
        with target.inference():
            draft = session.timed("draft", drafter.propose, session, target)
            scores = session.timed("verify", target.score, session, draft)
            u = session.timed("accept", session.noise, draft, scores.law)
            verdict = session.timed("accept", along_path, draft, scores.law, session.rule, u, session.spent)
            round_ = session.timed("commit", session.commit, draft, scores, verdict)
            session.timed("commit", target.commit, session, round_)
            session.count(round_)
        yield round_
        session.retire()
