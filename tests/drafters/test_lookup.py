"""`lookup=True`: a row's own text beside a trained drafter; it changes what is drafted, and nothing of what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import table_targets
import tiny_vlms
import torch
from compared import as_stock
from hostile_drafters import eagle
from torch import Tensor

from mmspec.drafters import lookup
from mmspec.drafters.lookup import Lookup, extended
from mmspec.rules import exact
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft
from tests.drafters.test_adaptive import Chain

CPU = torch.device("cpu")


def test_a_line_in_a_chain_takes_the_place_of_what_stood_there() -> None:
    draft = Draft(torch.tensor([[7, 1, 2], [8, 3, 4], [9, 5, 6]]), chain(3, CPU).expand(3))
    found = extended(draft, [(0, [11, 12, 13, 14]), (2, [21]), (0, [])])
    assert found.tokens.tolist() == [
        [7, 11, 12, 13, 14, *[NO_TOKEN] * 2], [8, 3, 4, 21, *[NO_TOKEN] * 3], [9, 5, 6, *[NO_TOKEN] * 4],
    ]  # fmt: skip
    assert found.tree.is_chain and extended(draft, [(0, []), (1, []), (2, [])]) is draft


def test_a_line_stands_behind_a_tree_and_alone_where_it_begins_at_the_root() -> None:
    draft = Draft(torch.tensor([[7, 1, 2], [8, 3, 4]]), from_parents(torch.tensor([[0, 0, 0], [0, 0, 1]]), 2))
    found = extended(draft, [(2, [11, 12]), (0, [21])])
    assert found.tokens[:, :5].tolist() == [[7, 1, 2, 11, 12], [8, NO_TOKEN, NO_TOKEN, 21, NO_TOKEN]]
    assert found.tree.parents[:, :5].tolist() == [[0, 0, 0, 2, 3], [0, 0, 1, 0, 3]]


def test_what_is_put_in_is_a_point_mass_also_where_the_drafter_drew_the_same() -> None:
    q = torch.randn(2, 3, 9)
    draft = Draft(torch.tensor([[7, 1, 2], [8, 3, 4]]), chain(3, CPU).expand(2), Categorical(q))
    found = extended(draft, [(0, [1, 5]), (0, [])])
    assert found.q is not None and found.q.logits is not None
    weights = found.q.logits.softmax(-1)
    assert weights[0, 1, 1] == 1 and weights[0, 2, 5] == 1
    torch.testing.assert_close(weights[1], q[1].softmax(-1))


# -- when it copies ---------------------------------------------------------------------------------------------------


class Rows:
    """A session whose rows say what they are told, a token a round."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts, self.drafter, self.brief = texts, Chain(3, 5), Chain(1, 5)
        rows = [SimpleNamespace(tokens=text[:12], generated=1) for text in texts]
        self.session = SimpleNamespace(rows=rows, last=SimpleNamespace(counts=(1,) * len(texts)))
        self.lookup = Lookup(self.drafter, self.brief)
        self.session.memory = self.lookup.start(self.session, None, None)

    def round(self) -> list[list[int]]:
        """The draft of each row."""
        draft = self.lookup.propose(self.session, None)
        for row, text in zip(self.session.rows, self.texts, strict=True):
            row.tokens = text[: len(row.tokens) + 1]
            row.generated += 1
        return [[token for token in row[1:] if token != NO_TOKEN] for row in draft.tokens.tolist()]


LOOP, FRESH = [*range(10)] * 6, [*range(100)]


def test_a_text_that_repeats_itself_is_copied_and_another_is_drafted() -> None:
    rows = Rows(LOOP, FRESH)
    drafts = [rows.round() for _ in range(30)]
    assert [one for _, one in drafts] == [[5, 5, 5]] * 30
    assert [one for one, _ in drafts][-1] == [(2 + i + 39) % 10 for i in range(lookup.LENGTH)]
    assert sum(one != [5, 5, 5] for one, _ in drafts) > 20 and rows.brief.asked == 0, "the other row needs its draft"


def test_where_all_rows_copy_the_drafter_only_reads() -> None:
    rows = Rows(LOOP, LOOP)
    for _ in range(30):
        rows.round()
    assert rows.brief.asked > 20


def test_rows_come_and_go() -> None:
    rows = Rows(LOOP, FRESH)
    for _ in range(20):
        rows.round()
    memory = rows.session.memory
    both = memory.select(torch.tensor([1])).join(memory.select(torch.tensor([0])))
    assert [row.copied for row in both.values] == [False, True] and both.values[1].index is memory.values[0].index


# -- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [2, [(0,), (1,), (0, 0)]], ids=["chain", "tree"])
@pytest.mark.parametrize("sound", [True, False])
def test_the_joint_law_of_what_is_drawn(paths: Any, sound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of a table, with drafts that are drawn and copies wherever there is one to make. A copy that was taken
    for a draw stands out."""
    monkeypatch.setattr(lookup, "EDGE", 0.0)
    monkeypatch.setattr(lookup, "LEAST", 0.0)
    if not sound:

        def mixed(q: Categorical, tokens: Tensor, own: Tensor) -> Tensor:
            return points(q, tokens, (torch.arange(own.shape[1]) < 2).expand_as(own))

        points = lookup._points
        monkeypatch.setattr(lookup, "_points", mixed)
    model = table_targets.TableModel(vocab=3, length=4, seed=3)
    drafter = Lookup(table_targets.Drawn(model, paths), table_targets.Drawn(model, 1))
    texts, _, session = table_targets.run(model, drafter, exact, 20000)
    excess = table_targets.excess(texts, model.joint(), 3)
    assert session.stats.accepted > 5000
    if sound:
        assert excess < 5
    elif paths == 2:
        assert excess > 8


def test_stocks_own_prompt_lookup_runs_beside_it() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    assert as_stock(model, inputs, eagle(model), lookup=True, call={"prompt_lookup_num_tokens": 3}).stats.rounds > 0
