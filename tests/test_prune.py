"""Pruning without training: the published choice by brute force, the attention that was really paid, exact output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import targets
import torch
from drafters import feature_drafter
from torch import Tensor

import mmspec
from mmspec.drafters.prune import MASS, kept
from mmspec.pipelines.targets import attention_record as attended
from mmspec.types import ATTENTION, FINAL

METHODS = ("eagle", "vispec", "msd", "flash", "specvlm")
LOOKS = {"prune": 0.5, "prune_by": "attention"}


# -- the choice ------------------------------------------------------------------------------------------------------


def by_hand(scores: list[float] | None, count: int, budget: int) -> list[int]:
    """One token after the other, as the published loop goes."""
    chosen: list[int] = []
    if scores is not None:
        total, covered = sum(scores), 0.0
        for i in sorted(range(count), key=lambda i: (-scores[i], i)):
            if len(chosen) == budget or covered >= MASS * total:
                break
            chosen.append(i)
            covered += scores[i]
    rest = [i for i in range(count) if i not in chosen]
    more = budget - len(chosen)
    for k in range(more):
        chosen.append(rest[round(k * (len(rest) - 1) / (more - 1)) if more > 1 else 0])
    return sorted(chosen)


@pytest.mark.parametrize("by", ["attention", "uniform"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 40, 200])
def test_the_choice_is_the_published_one(count: int, share: float, by: str) -> None:
    g = torch.Generator().manual_seed(count)
    visual = torch.cat([torch.zeros(3), torch.ones(count), torch.zeros(2), torch.full((count,), 2), torch.zeros(1)])[
        None
    ]
    scores = torch.rand(visual.shape, generator=g, dtype=torch.float64) ** 4 if by == "attention" else None
    stay = kept(visual, share, scores)[0]
    seen = (visual[0] > 0).nonzero()[:, 0]
    budget = round(1e9 * 2 * count * (1 - share)) // 10**9
    wanted = by_hand(None if scores is None else scores[0, seen].tolist(), 2 * count, budget)
    assert stay[seen].nonzero()[:, 0].tolist() == wanted and len(wanted) == budget
    assert stay[visual[0] == 0].all()


def test_more_is_kept_as_less_is_left_out() -> None:
    visual, scores = torch.ones(1, 50, dtype=torch.long), torch.rand(1, 50)
    counts = [int(kept(visual, share / 20, scores).sum()) for share in range(21)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 50 and counts[-1] == 0


# -- the attention ---------------------------------------------------------------------------------------------------


class Seeing:
    """A drafter that proposes nothing and keeps what it was told of the prompt."""

    features = (FINAL, ATTENTION)
    nodes = 1

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    def fit(self, *_: Any) -> Seeing:
        return self

    def start(self, session: Any, target: Any, prompt: Any) -> None:
        self.prompts.append(prompt)

    def propose(self, session: Any, target: Any) -> Any:
        from mmspec.tree import lone

        return lone(session.pending[:, None])


def maps(model: Any, inputs: dict[str, Tensor]) -> dict[int, Tensor]:
    """The attention maps [B, heads, L, L] of the layers that are listened to, as eager attention gives them."""
    model = copy.deepcopy(model)  # collecting maps leaves hooks behind
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    names = attended.layers(model.get_decoder())
    return {int(name.split()[1]): out.attentions[int(name.split()[1])] for name in names}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llava", "ragged"), ("llava", "image last"), ("qwen2_5_vl", "ragged video"), ("qwen3_vl", "several images")],
)
def test_what_is_told_is_the_attention_of_the_text_behind_the_last_image(name: str, kind: str, attn: str) -> None:
    model, inputs, seeing = targets.model(name, attn), targets.prompt(name, kind), Seeing()
    stock = targets.generate(model, inputs, max_new_tokens=4)
    with mmspec.enable(model, drafter=seeing):
        assert torch.equal(stock, targets.generate(model, inputs, max_new_tokens=4))
    [prompt] = seeing.prompts
    looked = list(maps(targets.model(name), inputs).values())
    L = prompt.ids.shape[1]
    for b in range(len(prompt.ids)):
        seen = prompt.visual[b].nonzero()[:, 0].tolist()
        asks = list(range(seen[-1] + 1 if seen else 0, L)) or [L - 1]
        asks = [j for j in asks if prompt.valid[b, j]]
        wanted = torch.stack([one[b, :, j] for one in looked for j in asks]).mean((0, 1))
        where = prompt.visual[b] > 0
        torch.testing.assert_close(prompt.attention[b, where], wanted[where], rtol=1e-4, atol=1e-6)


def test_without_pictures_nothing_is_asked_and_of_a_long_text_only_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of all rows would be heads · L² numbers in each of the layers that are listened to."""
    asked: list[tuple[int, int]] = []
    hear = attended.Attended.record

    def counted(self: attended.Attended, query: Tensor, key: Tensor, scaling: float) -> None:
        asked.append((query.shape[2], self.asks.shape[1]))
        hear(self, query, key, scaling)

    monkeypatch.setattr(attended.Attended, "record", counted)
    monkeypatch.setattr(attended, "ASKING", 3)
    model = targets.model("llava")
    for kind in ("text only", "image first"):
        inputs = targets.prompt("llava", kind)
        stock = targets.generate(model, inputs, max_new_tokens=8)
        with mmspec.enable(model, drafter=feature_drafter("eagle", model), **LOOKS):
            assert torch.equal(stock, targets.generate(model, inputs, max_new_tokens=8))
        if kind == "text only":
            assert not asked
    assert asked and all(rows == 3 < length for length, rows in asked)


def test_nothing_is_left_on_the_model() -> None:
    model, inputs = targets.model("llava"), targets.prompt("llava", "ragged")
    stock, before = targets.generate(model, inputs), [(type(m), set(vars(m))) for m in model.modules()]
    with mmspec.enable(model, drafter=feature_drafter("eagle", model), **LOOKS):
        targets.generate(model, inputs)
        again = copy.deepcopy(model)
        assert again.config._attn_implementation == model.config._attn_implementation == "sdpa"
        assert [type(m) for m in again.modules()] == [kind for kind, _ in before]
    assert [(type(m), set(vars(m))) for m in model.modules()] == before
    assert torch.equal(stock, targets.generate(again, inputs)) and torch.equal(stock, targets.generate(model, inputs))


# -- drafting --------------------------------------------------------------------------------------------------------


CASES = [("llava", "ragged", method, by) for method in METHODS for by in ("attention", "uniform")]
CASES += [("qwen2_5_vl", "ragged video", method, "attention") for method in ("eagle", "specvlm")]


@pytest.mark.parametrize(("name", "kind", "method", "by"), CASES)
def test_every_method_drafts_on_fewer_rows_and_the_output_is_the_targets(
    name: str, kind: str, method: str, by: str
) -> None:
    model, inputs = targets.model(name), targets.prompt(name, kind)
    more = {"latents": 3, "least": 1} if method == "flash" else {}
    drafter = feature_drafter(method, model, **more)
    stock, rows = targets.generate(model, inputs), []
    for share in (0.0, 0.5, 1.0):
        with mmspec.enable(model, drafter=drafter, prune=share, prune_by=by) as handle:
            assert torch.equal(stock, targets.generate(model, inputs))
            rows.append(handle.stats.drafter["visual rows"])
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1] == 0


def test_leaving_nothing_out_drafts_the_same() -> None:
    model, inputs = targets.model("llava"), targets.prompt("llava", "ragged")
    drafted = []
    for options in ({}, {"prune": 0.0}):
        with mmspec.enable(model, drafter=feature_drafter("eagle", model), **options) as handle:
            targets.generate(model, inputs)
            drafted.append((handle.stats.accepted, handle.stats.drafter["rows"]))
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prune": 1.5}, "a share from 0 to 1"),
        ({"prune_by": "uniform"}, "give both"),
        ({"prune": 0.5, "prune_by": "x"}, "must be one of"),
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mmspec.enable(targets.model("llava"), feature_drafter("eagle", targets.model("llava")), **wrong)


def test_a_drafter_without_features_has_no_use_for_it() -> None:
    with pytest.raises(ValueError, match="no use for prune"):
        mmspec.enable(targets.model("llava"), drafter="ngram", prune=0.5)
