"""Drafts from the frequent tokens of a large vocabulary: which those are, and that the output is stock's."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import tiny_vlms
import torch
import uncompiled
from compared import as_stock
from hostile_drafters import eagle, feature_drafter

import mmspec
from mmspec import rules
from mmspec.compile.capture import PiecewiseFunction
from mmspec.drafters import frequent
from mmspec.drafters.frequent import FrequentDrafts, FrequentTokens
from mmspec.pipelines.families import decoder_only

CHAIN, TREE = {"tree": "chain", "depth": 3}, {"depth": 3, "width": 3, "size": 10}
ROWS = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of tiny models, 128, is a large one; pieces of captures run as they are."""
    uncompiled.pieces(monkeypatch, forwards=False)
    sizes = {"ROWS": ROWS, "LEAST": 2 * ROWS, "WINDOW": 64, "ENOUGH": 16, "FEW": 0.94, "MANY": 0.97, "RENEWED": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(frequent, name, value)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two drafters proposed, round by round."""
    seen: list[str] = []
    propose = FrequentDrafts.propose

    def watched(self: FrequentDrafts, *told: Any) -> Any:
        names = {id(self.whole): "whole", id(self.few): "few"}
        for one in (self.whole, self.few):
            own = type(one).propose

            def noted(session: Any, target: Any, one: Any = one, own: Callable[..., Any] = own) -> Any:
                seen.append(names[id(one)])
                return own(one, session, target)

            one.propose = noted
        try:
            return propose(self, *told)
        finally:
            del self.whole.propose, self.few.propose

    monkeypatch.setattr(FrequentDrafts, "propose", watched)
    return seen


def tokens(model: Any) -> FrequentTokens:
    return FrequentTokens(decoder_only.DecoderOnly().describe(model))


def test_the_first_tokens_make_room_for_those_that_occur() -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    model.generation_config.eos_token_id = [2, 127]
    found = tokens(model)
    vocab, ids = found.vocab, found.vocab.ids
    assert ids.tolist() == [*range(ROWS - 1), 127] and found.suffice
    found.read([100, 101, 101, -1, 999])  # pictures may have ids that no token has
    assert 100 not in ids
    found.decided([110, 110, 111, 112])
    found.read([5])
    assert (
        found.vocab is vocab and vocab.ids is ids and ids.tolist() == [*range(ROWS - 6), 100, 101, 110, 111, 112, 127]
    )
    found.decided([110] * 3 + [126] * 4)
    found.read([*range(60, 100)] * 2)
    assert {60, 90, 126, 110, 127, 2} <= {*ids.tolist()} and not {0, 1, 3, 100, 111} & {*ids.tolist()}
    assert len({*ids.tolist()}) == ROWS and ids.tolist() == sorted(ids.tolist())


def test_they_suffice_while_few_of_the_latest_are_missing() -> None:
    found = tokens(tiny_vlms.model("llava"))

    def suffice(*decided: int) -> bool:
        """In the call after these tokens."""
        before = found.suffice
        found.decided(decided)
        assert found.suffice is before
        found.read([])
        return found.suffice

    assert suffice(*[127] * 15)  # too few say nothing
    assert not suffice(127)
    assert not suffice(*[3] * 61)  # 3 of 64 are missing
    assert suffice(3, 127, 127)
    assert suffice(*[126] * 3)
    assert not suffice(126)


CASES = [
    ("eagle", CHAIN),
    ("eagle", TREE | {"compile": True}),
    ("eagle", CHAIN | {"compile": True, "depth": 8, "adaptive": True}),
    ("eagle", CHAIN | {"lookup": True, "compile": True}),
    ("eagle", CHAIN | {"auto": True}),
    ("vispec", TREE),
]


@pytest.mark.parametrize(("method", "options"), CASES)
def test_its_output_is_stocks_with_either_head(method: str, options: dict[str, Any], heads: list[str]) -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    inputs = tiny_vlms.prompt("llava", "image first" if options.get("compile") else "ragged")
    made, count = feature_drafter(method, model), PiecewiseFunction.made
    as_stock(model, inputs, made, times=3, call={"max_new_tokens": 12}, **options)
    assert heads[0] == "few"
    assert "whole" in heads or "auto" in options  # tiny models say anything; `auto` soon turns drafting off
    assert (PiecewiseFunction.made > count) == bool(options.get("compile"))


def test_a_resized_model_has_other_frequent_tokens(heads: list[str]) -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "ragged")
    made, outputs = eagle(model), []
    for enabled in (True, False):
        with mmspec.enable(model, made, **CHAIN) if enabled else contextlib.nullcontext():
            for rows in (tiny_vlms.VOCAB, tiny_vlms.VOCAB + 8, tiny_vlms.VOCAB):
                model.resize_token_embeddings(rows, mean_resizing=False)
                for layer, scale in ((model.get_input_embeddings(), 1), (model.get_output_embeddings(), 1.5)):
                    with torch.no_grad():
                        layer.weight[tiny_vlms.VOCAB :] = scale * layer.weight[: rows - tiny_vlms.VOCAB]
                outputs.append(tiny_vlms.generate(model, inputs, max_new_tokens=12))
    assert all(map(torch.equal, outputs[:3], outputs[3:])) and heads and outputs[1].max() >= tiny_vlms.VOCAB


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
def test_a_seed_draws_the_same_with_other_frequent_tokens(
    kernel: bool, options: dict[str, Any], heads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the head are read where no kernel draws with noise that is fixed before."""
    monkeypatch.setattr(frequent.dispatch, "defined", lambda *_: not kernel)
    model = copy.deepcopy(tiny_vlms.model("llava"))
    inputs = tiny_vlms.prompt("llava", "ragged")
    drawn, ids = [], []
    with mmspec.enable(model, eagle(model), **options) as handle:
        for _ in range(3):
            torch.manual_seed(3)
            drawn.append(tiny_vlms.generate(model, inputs, do_sample=True, temperature=1.3, max_new_tokens=16).tolist())
            ids.append(handle.proposer.tokens.vocab.ids.tolist())
    assert drawn[0] == drawn[1] == drawn[2] and ids[0] != ids[2]
    assert "whole" in heads and ("few" in heads) is kernel


def test_a_relaxed_rule_reads_all(heads: list[str]) -> None:
    """Whose tokens depend on the draft, also in greedy calls."""
    model = copy.deepcopy(tiny_vlms.model("llava"))
    rule = rules.lantern(codebook=model.get_input_embeddings().weight.detach(), k=100, lam=100.0)
    with mmspec.enable(model, eagle(model), **CHAIN, rule=rule):
        tiny_vlms.generate(model, tiny_vlms.prompt("llava", "ragged"))
    assert {*heads} == {"whole"}


def test_rows_are_not_kept_after_disable() -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    with mmspec.enable(model, eagle(model), **CHAIN) as handle:
        tiny_vlms.generate(model, tiny_vlms.prompt("llava", "ragged"))
        vocab = weakref.ref(handle.proposer.tokens.vocab)
        counted = handle.proposer.tokens
        assert len(vocab().tensors) == 2
    del handle
    gc.collect()
    assert vocab() is None
    with mmspec.enable(model, eagle(model), **CHAIN) as handle:
        assert handle.proposer.tokens is counted


def test_a_head_with_hooks_is_read_whole(heads: list[str]) -> None:
    hooked = copy.deepcopy(tiny_vlms.model("llava"))
    accelerate.dispatch_model(hooked, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    as_stock(hooked, tiny_vlms.prompt("llava", "ragged"), eagle(hooked), **CHAIN)
    assert not heads


@pytest.mark.parametrize(
    "drafter",
    [
        lambda model: (eagle(model), {"draft_vocab": "all"}),
        lambda model: (eagle(model), {"draft_vocab": 50}),
        lambda model: (eagle(model, draft_vocab=50), {}),
        lambda model: (eagle(model), {"tree": "reverse_balanced_25", "draws": True}),
        lambda model: ("suffix", {}),
    ],
)
def test_they_are_not_for_drafters_that_say_what_they_draft_from(drafter: Callable[..., Any], heads: list[str]) -> None:
    model = tiny_vlms.model("llava")
    made, options = drafter(model)
    as_stock(model, tiny_vlms.prompt("llava", "ragged"), made, **options)
    assert not heads
