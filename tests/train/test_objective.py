"""What drafters learn: every loss against a slow transcription of its formula, on exactly the rows that are meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.train import objective
from mmspec.train.objective import cross_entropy, expected_tokens, law_distance, list_mle, losses
from mmspec.train.recipes import FLASH, MSD, RECIPES, SPECVLM, VISPEC, Recipe, Stage
from mmspec.train.trace import Trace

B, T, H, V = 3, 11, 6, 13


@pytest.fixture
def distributions() -> tuple[Tensor, Tensor]:
    """Logits of q and probabilities of p, [7, V], some of them sharp."""
    g = torch.Generator().manual_seed(3)
    p = (torch.randn(7, V, generator=g) * torch.tensor([0.3, 1, 3, 9, 1, 1, 1])[:, None]).softmax(-1)
    return 2 * torch.randn(7, V, generator=g), p


def _softmax(row: list[float]) -> list[float]:
    whole = sum(math.exp(s) for s in row)
    return [math.exp(s) / whole for s in row]


def _list_mle(s: list[float], p: list[float], ranked: int) -> float:
    order = sorted(range(V), key=lambda v: -p[v])[:ranked]
    return sum(math.log(sum(math.exp(s[v]) for v in order[i:])) - s[order[i]] for i in range(len(order)))


FORMULAS: dict[str, tuple[Callable[..., Tensor], Callable[[list[float], list[float]], float]]] = {
    "cross-entropy": (cross_entropy, lambda s, p: -sum(p[v] * math.log(_softmax(s)[v]) for v in range(V))),
    "law distance": (law_distance, lambda s, p: sum(abs(_softmax(s)[v] - p[v]) for v in range(V))),
    **{f"list {n}": (partial(list_mle, ranked=n), partial(_list_mle, ranked=n)) for n in (1, 4, 10, 99)},
}


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_are_the_formulas(distributions: tuple[Tensor, Tensor], name: str) -> None:
    loss, formula = FORMULAS[name]
    wanted = [formula(s, p) for s, p in zip(*(t.tolist() for t in distributions), strict=True)]
    assert loss(*distributions).tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5 if "list" in name else None)


class ToyHead:
    """A matrix, and the tokens of `own` that a drafter knows of it; None: all."""

    def __init__(self, matrix: Tensor, own: Tensor | None) -> None:
        self.matrix, self.own = matrix, own

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden @ self.matrix.T

    def to_draft(self, x: Tensor) -> Tensor:
        return x if self.own is None else x[..., self.own]

    def to_target(self, ids: Tensor) -> Tensor:
        return ids if self.own is None else self.own[ids]


class Toy:
    """Network, drafter and teacher in one: features are turned, predictions recorded, the head is a matrix."""

    masked = positioned = False

    def __init__(self, own: Tensor | None = None) -> None:
        g = torch.Generator().manual_seed(5)
        self.turn, self.heads = torch.randn(H, H, generator=g), torch.randn(V, H, generator=g)
        self.head, self.read, self.asked = ToyHead(self.heads, own), [], []

    def __call__(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, steps: int, start: int,
        rows: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        self.read.append(features)
        self.asked.append(rows)
        return [(features + embeds) @ self.turn + i for i in range(steps)]

    def logits(self, hidden: Tensor, _: Any) -> Tensor:
        return self.head.to_draft(self.head(hidden))


@pytest.fixture
def trace() -> Trace:
    """Sequences of 11, 11 and 9 tokens, of which the last 5, 7 and 4 are answers."""
    g = torch.Generator().manual_seed(9)
    place = torch.arange(T)
    lengths, answers = torch.tensor([[11], [11], [9]]), torch.tensor([[5], [7], [4]])
    final = torch.randn(B, T, H, generator=g)
    return Trace(
        torch.randint(V, (B, T), generator=g), torch.randn(B, T, H, generator=g), final, final, place < lengths,
        (place >= lengths - answers) & (place < lengths), torch.zeros(B, T, dtype=torch.long),
        place.expand(B, T)[..., None],
    )  # fmt: skip


def _slow(toy: Toy, trace: Trace, recipe: Recipe) -> float:
    """The loss, row by row as the papers write it: step i at row j foretells token j + 2 + i, if the text is an answer
    from token j + 2 on."""
    total, features, outputs = 0.0, trace.features[:, :-1], []
    for _ in range(1 + recipe.rollouts):
        outputs = [(features + trace.embeds[:, 1:]) @ toy.turn + i for i in range(recipe.unroll)]
        for i, predicted in enumerate(outputs):
            found = []
            for b in range(B):
                for j in range(T):
                    if j + 2 + i < T and all(trace.answered[b, j + 2 + k] for k in range(i + 1)):
                        found.append(_of_row(toy, predicted[b, j], trace.final[b, j + 1 + i], recipe))
            total += recipe.step_decay**i * sum(found) / len(found)
        features = features.clone()
        features[:, 1:] = outputs[0][:, :-1]
    return total


def _of_row(toy: Toy, z: Tensor, h: Tensor, recipe: Recipe) -> float:
    q, p = (toy.heads @ z).softmax(0), (toy.heads @ h).softmax(0)
    loss = recipe.token_weight * -(p * (toy.heads @ z).log_softmax(0)).sum() + recipe.law_weight * (q - p).abs().sum()
    smooth = [0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in (z - h).tolist()]
    loss = loss + recipe.feature_weight * sum(smooth) / H
    s = (toy.heads @ z)[p.argsort(descending=True)[: recipe.ranked]]
    rank = sum(s[i:].logsumexp(0) - s[i] for i in range(len(s)))
    return float(loss + recipe.rank_weight * rank)


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPES["eagle"],
        VISPEC.at(0),
        VISPEC.at(VISPEC.steps - 1),
        MSD.at(0),
        replace(FLASH, unroll=4),
        SPECVLM,
    ],
    ids=["eagle", "vispec on text", "vispec", "msd", "flash", "specvlm"],
)
def test_the_loss_of_each_recipe_is_the_papers(trace: Trace, recipe: Recipe) -> None:
    recipe, toy = replace(recipe, noise=0.0), Toy()
    assert losses(toy, toy, toy, trace, recipe)[0].item() == pytest.approx(_slow(toy, trace, recipe), rel=1e-4)
    assert len(toy.read) == 1 + recipe.rollouts


def test_a_second_pass_reads_the_first_ones_predictions_one_row_later(trace: Trace) -> None:
    toy = Toy()
    losses(toy, toy, toy, trace, replace(VISPEC.at(VISPEC.steps - 1), noise=0.0))
    first, second = toy.read
    made = (first + trace.embeds[:, 1:]) @ toy.turn
    assert torch.equal(second[:, 0], trace.features[:, 0]) and torch.equal(second[:, 1:], made[:, :-1])
    assert toy.asked == [None, None]  # predicted everywhere, so that there is something to read


def test_where_nothing_was_predicted_a_second_pass_reads_the_target(trace: Trace) -> None:
    class Compressing(Toy):
        def __call__(self, *read: Any) -> list[Tensor]:
            made = super().__call__(*read)
            made[0][:, 2:5] = 0
            return made

    toy = Compressing()
    losses(toy, toy, toy, trace, replace(VISPEC.at(VISPEC.steps - 1), noise=0.0))
    assert torch.equal(toy.read[1][:, 3:6], trace.features[:, 3:6])
    assert not torch.isclose(toy.read[1][:, 6:], trace.features[:, 6:-1]).any(-1).all()


def test_noise_is_scaled_by_the_length(trace: Trace) -> None:
    toy = Toy()
    losses(toy, toy, toy, trace, Recipe(noise=0.1, unroll=1))
    off = (toy.read[0] - trace.features[:, :-1]).abs().amax((1, 2))
    half = 0.1 * 512 / torch.tensor([11.0, 11, 9])
    assert (off <= half).all() and (off > 0.8 * half).all()


def test_a_draft_vocabulary_learns_only_what_it_can_say(trace: Trace) -> None:
    best = Toy().head(trace.final).argmax(-1)
    common = best.flatten().bincount(minlength=V).argsort(descending=True)[:3].sort().values
    toy, recipe = Toy(common), Recipe(unroll=1, feature_weight=0.0, token_weight=1.0)
    loss, agree = losses(toy, toy, toy, trace, recipe)
    found, right = [], []
    z = (trace.features[:, :-1] + trace.embeds[:, 1:]) @ toy.turn
    for b in range(B):
        for j in (j for j in range(T - 2) if trace.answered[b, j + 2]):
            s, p = toy.heads @ z[b, j], toy.heads @ trace.final[b, j + 1]
            right.append(int(common[s[common].argmax()]) == int(p.argmax()))
            if int(p.argmax()) in common.tolist():
                found.append(-(p[common].softmax(0) * s[common].log_softmax(0)).sum().item())
    assert 0 < len(found) < len(right)
    assert loss.item() == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert expected_tokens(agree) == pytest.approx(1 + sum(right) / len(right))


@pytest.mark.parametrize("changes", [{}, {"overlap": True, "law_weight": 1.0}])
def test_large_steps_are_in_memory_one_at_a_time_and_learn_the_same(
    changes: dict[str, Any], trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, wide = [], []
    for large in (objective.LARGE, 0):
        monkeypatch.setattr(objective, "LARGE", large)
        toy, kept = Toy(), list[Tensor]()
        toy.turn.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            loss, agree = losses(toy, toy, toy, trace, Recipe(**changes))
        loss.backward()
        learnt.append((loss, agree, toy.turn.grad))
        wide.append(sum(t.shape[-1:] == (V,) for t in kept))
    assert all(map(torch.equal, *learnt)) and wide[0] >= 3 and wide[1] == 0


# -- stages ----------------------------------------------------------------------------------------------------------


def test_msd_mixes_as_published() -> None:
    """With one step an epoch: none of twenty epochs with pictures, then (t − 20) / 20 in epoch t, all in the 40th."""
    recipe = MSD.with_(steps=40)
    published = [0.0 if t <= 20 else (t - 20) / 20 for t in range(1, 41)]
    assert [recipe.pictures(t - 1) for t in range(1, 41)] == pytest.approx(published)


def test_vispec_begins_on_text_and_anew_with_pictures() -> None:
    recipe = VISPEC.with_(steps=200)
    assert {recipe.pictures(step) for step in range(100)} == {0.0}
    assert {recipe.pictures(step) for step in range(100, 200)} == {1.0}
    assert recipe.rate(99) == pytest.approx(recipe.rate(199)) and recipe.rate(99) == recipe.lr * recipe.floor
    assert recipe.rate(100) == recipe.rate(0) < recipe.rate(4) > recipe.rate(50)
    first, second = recipe.at(99), recipe.at(100)
    assert (first.feature_weight, first.law_weight, first.rollouts) == (1.0, 0.0, 0)
    assert (second.feature_weight, second.law_weight, second.rollouts) == (0.0, 10.0, 1)
    assert recipe.stage(0)[0].frozen and not recipe.stage(100)[0].frozen


def test_a_changed_value_holds_in_all_stages() -> None:
    recipe = VISPEC.with_(rank_weight=0.5)
    assert recipe.at(0).rank_weight == recipe.at(recipe.steps - 1).rank_weight == 0.5
    assert recipe.at(recipe.steps - 1).law_weight == 10.0


def test_without_text_the_stages_on_text_fall_away() -> None:
    assert VISPEC.texts and MSD.texts and not FLASH.texts
    for recipe in (VISPEC, MSD):
        short = recipe.without_texts()
        assert not short.texts and len(short.stages) == 1 and short.pictures(0) == 1.0
    assert VISPEC.without_texts().at(0).law_weight == 10.0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"stages": (Stage(0.5),)}, "add up"),
        ({"stages": (Stage(changes={"speed": 2}),)}, "speed"),
        ({"clip_by": "force"}, "clip_by"),
    ],
)
def test_bad_recipes_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Recipe(**changes)
