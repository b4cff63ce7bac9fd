"""`lookup=True`: a row's own text beside a trained drafter; it changes what is drafted, and nothing of what is said."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import published_mtp
import pytest
import table_targets
import tiny_vlms
import torch
from hostile_drafters import eagle, feature_drafter
from torch import Tensor

import mmspec
from mmspec.drafters import extended as extending
from mmspec.drafters import lookup
from mmspec.drafters.block_config import BlockConfig
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.extended import extended
from mmspec.drafters.lookup import Lookup
from mmspec.rules import exact
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft
from tests.core.test_core import chi_square

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


class Five:
    """Drafts token 5 so many times."""

    features: tuple[int, ...] = ()

    def __init__(self, depth: int) -> None:
        self.nodes, self.asked = depth + 1, 0

    def start(self, session: Any, *_: Any) -> Any:
        return table_targets.Nothing()

    def propose(self, session: Any, target: Any) -> Draft:
        self.asked += 1
        B = len(session.rows)
        return Draft(torch.full((B, self.nodes), 5), chain(self.nodes, CPU).expand(B))


class Rows:
    """A session whose rows say what they are told, a token a round."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts, self.drafter, self.brief = texts, Five(3), Five(1)
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

        points = extending._points
        monkeypatch.setattr(extending, "_points", mixed)
    model = table_targets.TableModel(vocab=3, length=4, seed=3)
    drafter = Lookup(table_targets.Drawn(model, paths), table_targets.Drawn(model, 1))
    texts, _, session = table_targets.run(model, drafter, exact, 20000)
    excess = chi_square(texts, model.joint(), 3)
    assert session.stats.accepted > 5000
    if sound:
        assert excess < 5
    elif paths == 2:
        assert excess > 8


def block(model: Any) -> BlockDrafter:
    head = model.get_output_embeddings().weight
    torch.manual_seed(5)
    values = {"hidden": head.shape[1], "intermediate": 48, "heads": 4, "kv_heads": 2, "vocab": head.shape[0]}
    return BlockDrafter(BlockConfig.of({**values, "layers": 2, "features": (0, 1), "block": 6, "mask_token": 3}))


def heads(model: Any, folder: Path) -> str:
    published_mtp.shipped(model, folder, published_mtp.qwen_heads(model))
    return "mtp"


def another(model: Any, folder: Path) -> Any:
    """A model that is often wrong."""
    made = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * weight.std(correction=0))
    return made


MADE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "eagle": ("llava", lambda model, folder: eagle(model), {}),
    "chain": ("llava", lambda model, folder: eagle(model), {"width": 1, "depth": 3}),
    "adaptive": ("llava", lambda model, folder: eagle(model), {"depth": 4, "adaptive": True}),
    "eagle-3": ("llava", lambda model, folder: eagle(model, draft_vocab=50), {"width": 2, "depth": 3, "size": 7}),
    "msd": ("llava", lambda model, folder: feature_drafter("msd", model), {}),
    "vispec": ("llava", lambda model, folder: feature_drafter("vispec", model, num_q=2), {}),
    "flash": ("llava", lambda model, folder: feature_drafter("flash", model), {}),
    "specvlm": ("llava", lambda model, folder: feature_drafter("specvlm", model), {}),
    "block": ("llava", lambda model, folder: block(model), {}),
    "model": ("llava", another, {"depth": 3}),
    "mtp": ("qwen3_5", heads, {}),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_greedy_text_is_stocks(name: str, compile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies wherever there is one to make, so that drafts and copies take turns."""
    monkeypatch.setattr(lookup, "EDGE", 0.0)
    monkeypatch.setattr(lookup, "LEAST", 0.0)
    kind, made, options = MADE[name]
    model = copy.deepcopy(tiny_vlms.model(kind))
    drafter = made(model, tmp_path)
    for case in ("image first", "ragged"):
        inputs = tiny_vlms.prompt(kind, case)
        wanted = tiny_vlms.generate(model, inputs, max_new_tokens=24)
        with mmspec.enable(model, drafter, lookup=True, compile=compile, **options) as handle:
            copies: list[int] = []
            inner = handle.proposer.propose

            def propose(session: Any, target: Any, inner: Any = inner, copies: list[int] = copies) -> Draft:
                draft = inner(session, target)
                copies += [row.copied for row in session.memory.values]
                return draft

            handle.proposer.propose = propose  # type: ignore[method-assign]
            found = tiny_vlms.generate(model, inputs, max_new_tokens=24)
        assert torch.equal(found, wanted)
        assert 0 < sum(copies) < len(copies), "both take turns"


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle", "plain"])
def test_it_goes_beside_drafters_that_learned(drafter: str) -> None:
    with pytest.raises(ValueError, match="so leave lookup out"):
        mmspec.enable(tiny_vlms.model("llava"), drafter, lookup=True)
    with pytest.raises(ValueError, match="lookup must be True or False"):
        mmspec.enable(tiny_vlms.model("llava"), drafter, lookup="yes")


def test_stocks_own_prompt_lookup_runs_beside_it() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    wanted = tiny_vlms.generate(model, inputs)
    with mmspec.enable(model, eagle(model), lookup=True) as handle:
        assert torch.equal(tiny_vlms.generate(model, inputs, prompt_lookup_num_tokens=3), wanted)
        assert handle.stats.rounds > 0
