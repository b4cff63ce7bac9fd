"""What a draft model reads is captured as a target's forward is, and drafts the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_vlms
import torch
import uncompiled

import mmspec
from mmspec.compile.capture import PiecewiseFunction
from mmspec.pipelines.drafters import draft_model as drafting
from mmspec.pipelines.target import captures
from mmspec.types import Draft

CHAIN, DRAWS = {"depth": 3, "width": 1}, {"tree": "chain", "depth": 3, "draws": True}
TREE = {"depth": 3, "width": 2, "size": 8}
SAMPLED = {"do_sample": True, "temperature": 30.0, "top_k": 0}


@pytest.fixture(autouse=True)
def pieces_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler runs, and whatever falls back fails."""
    uncompiled.pieces(monkeypatch, uncompiled.strictly)


def draft_of(model: Any) -> Any:
    """A model that agrees with it now and then."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.get_decoder().layers.parameters():
            weight.add_(0.02 * weight.std().nan_to_num() * torch.randn_like(weight))
    return draft


def proposed(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Every draft from now on."""
    found: list[Draft] = []
    grown = drafting.grown

    def told(*args: Any) -> Draft:
        found.append(grown(*args))
        return found[-1]

    monkeypatch.setattr(drafting, "grown", told)
    return found


@pytest.mark.parametrize(
    "name, kind, options",
    [
        pytest.param("llava", "image first", DRAWS, marks=pytest.mark.full),
        pytest.param("llava", "ragged", CHAIN, marks=pytest.mark.full),
        ("llava", "ragged", TREE),
        pytest.param("llava", "ragged", DRAWS, marks=pytest.mark.full),
        ("qwen3_5", "ragged video", CHAIN),
    ],
)
@pytest.mark.every(6)
def test_drafts_are_those_of_the_model_itself(
    name: str, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, inputs = tiny_vlms.model(name), tiny_vlms.prompt(name, kind)
    draft, how = draft_of(model), SAMPLED if "draws" in options else {}
    seen, answers = proposed(monkeypatch), []
    for compiling in (False, True):
        torch.manual_seed(7)
        with mmspec.enable(model, draft, compile=compiling, **options):
            answers.append((tiny_vlms.generate(model, inputs, **how), [*seen]))
        seen.clear()
    (plain, one), (ours, other) = answers
    captured = captures.of(draft)._captures
    assert all(captured.values()) and len(captured) == len({len(draft.tokens) for draft in other})
    assert torch.equal(plain, ours) and len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.tree.parents, b.tree.parents)
        assert (a.q is None) == (b.q is None)
        if a.q is not None:
            torch.testing.assert_close(a.q.logits.softmax(-1), b.q.logits.softmax(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_other_weights_and_options_are_captured_anew() -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    draft, made = draft_of(model), []
    full = tiny_vlms.generate(model, inputs, max_new_tokens=6)
    for options, change in ((CHAIN, False), (CHAIN, False), (CHAIN, True), (CHAIN | {"depth": 4}, False)):
        if change:
            draft.load_state_dict({name: -t for name, t in draft.state_dict().items()}, assign=True)
        before = PiecewiseFunction.made
        with mmspec.enable(model, "model", draft=draft, compile=True, **options):
            assert torch.equal(tiny_vlms.generate(model, inputs, max_new_tokens=6), full)
        made.append(PiecewiseFunction.made - before)
    assert made[0] and not made[1] and made[2] and made[3]
