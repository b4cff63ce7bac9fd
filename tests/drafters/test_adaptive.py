"""`adaptive=True`: how long a chain is follows from what was accepted, and changes nothing of what is generated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import table_targets
import tiny_vlms
import torch
from hostile_drafters import Scripted

from mmspec.drafters.growth import Adaptive, chain_lengths
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Draft
from tests.host import test_recurrent_law


class Chain:
    """Drafts the same token so many times, and counts how often it is asked."""

    features: tuple[int, ...] = ()

    def __init__(self, depth: int, token: int = 7) -> None:
        self.depth, self.nodes, self.token, self.asked = depth, depth + 1, token, 0

    def start(self, session: Any, *_: Any) -> Any:
        return table_targets.Nothing()

    def propose(self, session: Any, target: Any) -> Draft:
        self.asked += 1
        B = len(session.rows)
        return Draft(torch.full((B, self.nodes), self.token), chain(self.nodes, torch.device("cpu")).expand(B))


class Rounds:
    """A session of some rows, told how many tokens of each draft were accepted."""

    def __init__(self, rows: int, greedy: bool) -> None:
        p = SimpleNamespace(is_point=greedy)
        self.session = SimpleNamespace(rows=[None] * rows)
        self.session.last = SimpleNamespace(
            counts=(1,) * rows, proposed=(0,) * rows, scores=SimpleNamespace(p=p)
        )  # the prefill
        self.drafter = Adaptive({depth: Chain(depth) for depth in (2, 4, 8)})
        self.session.memory = self.drafter.start(self.session, None, None)

    def propose(self) -> list[int]:
        """How many tokens each row is drafted."""
        draft = self.drafter.propose(self.session, None)
        found = (draft.tokens[:, 1:] != NO_TOKEN).sum(1).tolist()
        self.session.last.proposed = tuple(found)
        return found

    def accepted(self, *counts: int) -> None:
        self.session.last.counts = tuple(1 + count for count in counts)


def test_lengths():
    assert [chain_lengths(depth) for depth in (1, 2, 5, 16)] == [[1], [1, 2], [1, 2, 5], [4, 8, 16]]


def test_a_row_gets_longer_drafts_while_they_are_accepted_and_shorter_ones_while_they_are_not():
    rounds, found = Rounds(1, greedy=False), []
    for accepted in (4, 8, 8, 5, 3, 2, 1, 0, 1, 2, 4):
        found += rounds.propose()
        rounds.accepted(min(accepted, found[-1]))
    assert found == [4, 8, 8, 8, 8, 4, 4, 2, 2, 2, 4]


def test_rows_that_draw_have_lengths_of_their_own():
    rounds = Rounds(3, greedy=False)
    assert rounds.propose() == [4, 4, 4]
    rounds.accepted(4, 2, 0)
    assert rounds.propose() == [8, 4, 2]
    rounds.session.rows.pop()
    rounds.session.memory.inner = None
    rounds.session.memory = rounds.session.memory.select(torch.tensor([2, 1]))
    rounds.session.last.proposed, rounds.session.last.counts = (2, 4), (1 + 2, 1 + 4)
    assert rounds.propose() == [4, 8]


def test_greedy_rows_share_the_median_length():
    rounds = Rounds(4, greedy=True)
    rounds.propose()
    rounds.accepted(4, 4, 0, 2)
    assert rounds.propose() == [4] * 4


class Told(Adaptive):
    """An instance that `enable` takes as it is."""

    def fit(self, *_: Any) -> Told:
        return self


def test_the_joint_law_of_three_tokens(monkeypatch: pytest.MonkeyPatch):
    """Of texts drafted one or two tokens at a time, of which the first is one of two that may come."""

    def drafted(law: test_recurrent_law.Law) -> Told:
        def line(row: Any, depth: int) -> tuple[list[int], list[int]]:
            text, tokens = tuple(row.tokens[row.start :]), []
            while len(tokens) < depth:
                below = list(law.after.get((*text, *tokens), {9: 1.0}))
                tokens.append(below[len(tokens) % len(below)])
            return tokens, list(range(depth))

        return Told({n: Scripted(lambda row, _, n=n: line(row, n), chained=True) for n in (1, 2)})

    monkeypatch.setattr(test_recurrent_law, "drafted", drafted)
    assert test_recurrent_law.distance(tiny_vlms.text(), monkeypatch) < 1e-5
