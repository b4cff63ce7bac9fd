"""The decoding loop of speculative decoding: propose → verify → accept → commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmspec.accept import along_path
from mmspec.protocols import Proposer, Target, reported
from mmspec.session import Row, Session
from mmspec.tree import lone
from mmspec.types import Prompt, Round


def prefill(target: Target, drafter: Proposer, rows: list[Row], inputs: Any) -> tuple[Session, Round, Prompt]:
    """Prefill the prompts of these rows; returns their session, the prefill's round, which has an empty draft, and what
    the drafter reads of the prompts.

    Args:
        inputs: the argument of the target's `prefill`, for all of the rows.
    """
    session = Session(rows, target.device)
    with session.timed("prefill"):
        prompt, scores = target.prefill(session, inputs, drafter.nodes)
    root = lone(prompt.ids[:, -1:])
    round_ = session.commit(root, scores, along_path(root, scores.p, session.rule, session.noise(root, scores.p)))
    return session, round_, prompt


def start(target: Target, drafter: Proposer, rows: list[Row], inputs: Any) -> tuple[Session, Round]:
    """`prefill`, after which the drafter reads the prompts, too."""
    session, round_, prompt = prefill(target, drafter, rows, inputs)
    read(session, target, drafter, prompt)
    return session, round_


def read(session: Session, target: Target, drafter: Proposer, prompt: Prompt) -> None:
    """Let the drafter read the prompts."""
    with session.timed("draft"):
        session.memory = drafter.start(session, target, prompt)
    session.stats.drafter = reported(session.memory)


def decode(session: Session, target: Target, drafter: Proposer) -> Iterator[Round]:
    """Yield rounds until every row has ended. Rows may be admitted between two rounds; ended rows are dropped."""
    session.retire()
    while session.rows:
        with target.inference():
            with session.timed("draft"):
                draft = drafter.propose(session, target)
            with session.timed("verify"):
                scores = target.score(session, draft)
            with session.timed("accept"):
                noise = session.noise(draft, scores.p)
                acceptance = along_path(draft, scores.p, session.rule, noise, session.spent)
            with session.timed("commit"):
                round_ = session.commit(draft, scores, acceptance)
                target.commit(session, round_)
            session.count(round_)
        yield round_
        session.retire()
