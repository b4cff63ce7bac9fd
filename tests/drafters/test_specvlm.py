"""SpecVLM: every branch against a slow transcription, the gate on the question, and the gate that learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_vlms
import torch
from compared import as_stock
from hostile_drafters import feature_drafter
from torch import Tensor
from torch.nn import functional as F

from mmspec.checkpoints.load import load_drafter
from mmspec.checkpoints.save import save_drafter
from mmspec.drafters.spans import runs
from mmspec.drafters.specvlm import (
    BRANCHES,
    CONCAT,
    SELECT,
    WEIGHED,
    WEIGHT,
    Convolution,
    Resampler,
    SpecVlmConfig,
    SpecVlmDrafter,
    question,
)
from tests.drafters.test_flash import LAYOUTS, Entering, H, literal, norm, randomised, row, rows, same_rows

RATIO = {"prune_ratio": 3, "pool_ratio": 3, "conv_ratio": 2, "queries": 3, "gate_width": 8, "resampler_heads": 2}


def specvlm(**options: Any) -> SpecVlmDrafter:
    return randomised(SpecVlmDrafter(SpecVlmConfig(H, 24, 2, 2, 40, **{**RATIO, **options})))


def brief(
    drafter: SpecVlmDrafter, name: str, e: Tensor, f: Tensor, weights: Tensor | None = None
) -> list[tuple[Tensor, int]]:
    """(residual, place) of every row that a branch, or the sum of all by weights, leaves of one image's rows."""
    c, n = drafter.config, len(e)
    through = [row(drafter, e[i], f[i])[1] for i in range(n)]
    common = -(-n // c.conv_ratio) if c.gate == WEIGHT else 0
    if name == WEIGHT:
        assert weights is not None
        each = [brief(drafter, one, e, f) for one in c.branches]
        sums = [sum(w * one[k][0] for w, one in zip(weights, each, strict=True)) for k in range(common)]
        return [(total, place) for total, (_, place) in zip(sums, each[c.branches.index("pool")], strict=True)]
    if name == CONCAT:
        return [each for one in c.branches for each in brief(drafter, one, e, f)]
    if name == "prune":
        C = common or max(1, n // c.prune_ratio)
        return [(through[(k + 1) * n // C - 1], (k + 1) * n // C - 1) for k in range(C)]
    if name == "pool":
        C = common or max(1, n // c.pool_ratio)
        ends = [(k * n // C, (k + 1) * n // C) for k in range(C)]
        return [(row(drafter, e[i:j].mean(0), f[i:j].mean(0))[1], j - 1) for i, j in ends]
    if name == "conv":
        taps, r, out = drafter.compressors["conv"].taps, c.conv_ratio, []
        for i in range(0, n, r):
            window = [through[min(i + t, n - 1)] for t in range(r)]
            out.append((taps.weight @ torch.cat(window) + taps.bias, min(i + r, n) - 1))
        return out
    if name == "resampler":
        R, D, out = drafter.compressors["resampler"], H // 2, []
        for k, q in enumerate(R.queries[: min(n, c.queries)]):
            seen = [norm(t, R.norm.weight) for t in through]
            query, o = R.q.weight @ norm(q, R.query_norm.weight), []
            for head in range(2):
                part = slice(head * D, (head + 1) * D)
                keys = torch.stack([(R.kv.weight[:H] @ t)[part] for t in seen])
                values = torch.stack([(R.kv.weight[H:] @ t)[part] for t in seen])
                o.append((keys @ query[part] / D**0.5).softmax(0) @ values)
            out.append((q + R.out.weight @ torch.cat(o), n - min(n, c.queries) + k))
        return out
    return []


def through(drafter: SpecVlmDrafter, name: str, weights: Tensor | None = None) -> Callable[..., Iterable[Entering]]:
    """What a branch makes of one image's rows, with the norm before attention."""
    normed = drafter.input_norm.weight
    return lambda e, f: ((norm(r, normed), r, place) for r, place in brief(drafter, name, e, f, weights))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*BRANCHES, CONCAT])
def test_what_enters_is_the_formula(name: str, layout: str) -> None:
    drafter, given = specvlm(gate=name), rows(layout)
    with torch.no_grad():
        encoded = drafter.encode_prompt(**given)
        for b in range(len(encoded.x)):
            same_rows(encoded, b, literal(drafter, given, b, through(drafter, name)))


def test_the_rows_of_a_batch_go_through_branches_of_their_own() -> None:
    drafter = specvlm()
    given = {k: v.repeat(5, *[1] * (v.dim() - 1)) for k, v in rows("several").items()}
    drafter.choose = lambda *_: torch.tensor([3, 1, 4, 0, 2])  # type: ignore[method-assign]
    with torch.no_grad():
        encoded = drafter.encode_prompt(**given)
        for b, number in enumerate((3, 1, 4, 0, 2)):
            same_rows(encoded, b, literal(drafter, given, b, through(drafter, BRANCHES[number])))
    assert encoded.stats == {f"branch {name}": 1.0 for name in BRANCHES}


def test_pool_and_convolution_are_torchs_own() -> None:
    x, r = torch.randn(2, 12, H), 3
    conv, there = randomised(Convolution(H, r)), torch.ones(2, 12, dtype=torch.bool)
    kernel = conv.taps.weight.view(H, r, H).transpose(1, 2)
    with torch.no_grad():
        wanted = F.conv1d(x.transpose(1, 2), kernel, conv.taps.bias, stride=r).transpose(1, 2)
        torch.testing.assert_close(conv(x, there)[0], wanted, rtol=1e-4, atol=1e-5)
        fresh = Convolution(H, r)(x, there)[0]
        torch.testing.assert_close(fresh, F.avg_pool1d(x.transpose(1, 2), r).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_published_lengths() -> None:
    """LLaVA-1.5 and 1.6: 28/28/192/2/0 of 576 rows and 144/144/960/2/0 of 2880."""
    drafter = SpecVlmDrafter(SpecVlmConfig(H, 24, 2, 2, 40))
    counts = [drafter._count(name, torch.tensor([576, 2880])).tolist() for name in BRANCHES]
    assert counts == [[28, 144], [28, 144], [192, 960], [2, 2], [0, 0]]


def test_a_resampler_looks_at_its_own_image_only() -> None:
    resampler = randomised(Resampler(SpecVlmConfig(H, 24, 2, 2, 40)))
    x = torch.randn(1, 9, H)
    there = torch.arange(9)[None] < 6
    with torch.no_grad():
        torch.testing.assert_close(resampler(x, there)[0], resampler(x[:, :6], there[:, :6])[0], rtol=1e-4, atol=1e-5)


# -- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "asked"),
    [
        ([0, 1, 1, 1, 0, 0, 0], [5, 6]),  # the row right behind the image is the image's
        ([0, 1, 1, 0, 2, 2, 0, 0], [7]),  # behind the last image
        ([0, 0, 1, 1, 1], [0, 1]),  # nothing behind it: all text
        ([0, 0, 1, 1, 0], [0, 1, 4]),
        ([0, 0, 0], [0, 1, 2]),
        ([-1, -1, 0, 1, 1, 0, 0], [6]),
    ],
)
def test_the_question_is_the_text_behind_the_last_image(kinds: list[int], asked: list[int]) -> None:
    kinds = torch.tensor([kinds])
    assert question(kinds.clamp(min=0), kinds >= 0)[0].nonzero()[:, 0].tolist() == asked


def test_the_gate_is_the_formula_and_its_best_branch_is_taken() -> None:
    drafter, given = specvlm(), rows("ragged")
    f, visual, valid = (given[k] for k in ("features", "visual", "valid"))
    gate, asked = drafter.gate, question(visual, valid)
    with torch.no_grad():
        found = gate(gate.question_of(f, visual, valid))
        for b in range(len(f)):
            q = torch.stack([h / (h.square().mean() + 1e-6).sqrt() for h in f[b, asked[b]]])
            h = gate.down.weight @ q.mean(0) + gate.down.bias
            wanted = gate.up.weight @ (h * torch.sigmoid(h)) + gate.up.bias
            torch.testing.assert_close(found[b], wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(drafter.choose(f, visual, valid), found.argmax(-1))


def test_while_it_learns_every_branch_is_drawn_and_pruning_is_random() -> None:
    drafter, given = specvlm().train(), rows("one image")
    torch.manual_seed(0)
    drawn = torch.cat([drafter.choose(given["features"], given["visual"], given["valid"]) for _ in range(200)])
    assert min(torch.bincount(drawn, minlength=5).tolist()) > 20
    drafter.config = replace(drafter.config, gate="prune")
    places = {tuple(drafter.encode_prompt(**given).positions[0].tolist()) for _ in range(40)}
    assert len(places) > 10 and all(len(set(p)) == 7 and list(p) == sorted(p) for p in places)
    drafter.eval()
    assert len({tuple(drafter.encode_prompt(**given).positions[0].tolist()) for _ in range(4)}) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weighted_sum_is_the_formula(layout: str) -> None:
    drafter, given = specvlm(gate=WEIGHT, branches=WEIGHED), rows(layout)
    with torch.no_grad():
        drafter.gate.up.weight.mul_(20)  # so that the weights differ
        asked = drafter.gate.question_of(*(given[k] for k in ("features", "visual", "valid")))
        weights = drafter.gate(asked).softmax(-1)
        encoded = drafter.encode_prompt(**given)
        for b in range(len(encoded.x)):
            same_rows(encoded, b, literal(drafter, given, b, through(drafter, WEIGHT, weights[b])))
    if encoded.stats:
        shown = (given["visual"] * given["valid"]).any(1)
        assert list(encoded.stats.values()) == pytest.approx(weights[shown].sum(0).tolist())


def test_weight_and_select_have_the_same_tensors(tmp_path: Path) -> None:
    drafter = specvlm(gate=WEIGHT, branches=WEIGHED)
    save_drafter(drafter, tmp_path)
    read = load_drafter(tmp_path)
    assert isinstance(read, SpecVlmDrafter) and read.config == drafter.config
    given = rows("several")
    with torch.no_grad():
        assert torch.equal(read.encode_prompt(**given).x, drafter.encode_prompt(**given).x)
    specvlm(branches=WEIGHED).load_state_dict(drafter.state_dict())


def test_a_gate_that_learns_along_draws_by_its_logits_and_hears_of_what_it_drew() -> None:
    drafter, given = specvlm(branches=("prune", "pool", "conv", "resampler")).train(), rows("several")
    drafter.gate.heat, logits = 0.7, torch.tensor([1.0, 0.0, -9.0, 2.0])
    torch.manual_seed(0)
    choice, weight = drafter.gate.draw(logits.expand(4000, 4).requires_grad_())
    torch.testing.assert_close(torch.bincount(choice, minlength=4) / 4000, logits.softmax(0), atol=0.03, rtol=0)
    assert torch.equal(weight, torch.ones(4000, 1)) and weight.requires_grad
    for step in drafter(given["embeds"], given["features"], given["visual"], given["valid"], 2):
        step.square().sum().backward(retain_graph=True)
    for name, parameter in drafter.gate.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name


def test_the_weight_of_what_was_drawn_reaches_the_attention() -> None:
    """The norm before it takes every factor out of the rows themselves."""
    drafter, given = specvlm(), rows("ragged")
    spans, choice = runs(given["visual"] * given["valid"]), torch.tensor([1, 2, 0, 3])
    read = [given[k] for k in ("embeds", "features", "valid", "positions")]
    weights = torch.tensor([[1.0], [2.0], [3.0], [0.5]])
    with torch.no_grad():
        plain, weighed = (drafter.compressed(spans, choice, *read, weight=w) for w in (None, weights))
    summary = (plain.valid & (plain.source < 0))[..., None]
    assert summary.any() and torch.equal(torch.where(summary, plain.x * weights[..., None], plain.x), weighed.x)


CASES = [("llava", "ragged", gate) for gate in (SELECT, WEIGHT, CONCAT, *BRANCHES, "none")]
CASES += [("qwen2_5_vl", "ragged video", gate) for gate in (SELECT, WEIGHT)]


@pytest.mark.parametrize(("name", "kind", "gate"), CASES)
@pytest.mark.every(3)
def test_the_output_is_the_targets_and_stats_tell_the_branch(name: str, kind: str, gate: str) -> None:
    model = tiny_vlms.model(name)
    special: dict[str, Any] = {"none": {"branches": (), "gate": SELECT}, WEIGHT: {"gate": gate, "branches": WEIGHED}}
    options = special.get(gate, {"gate": gate})
    drafter = feature_drafter("specvlm", model, **{**RATIO, **options}, depth=3, width=3, size=10)
    told = as_stock(model, tiny_vlms.prompt(name, kind), drafter).stats.drafter
    branches = {k: v for k, v in told.items() if k.startswith(("branch", "weight"))}
    if gate == "none":
        assert not branches and told["visual rows"] == told["visual rows before"]
    else:
        ways = len(BRANCHES) if gate == CONCAT else 1
        assert sum(branches.values()) == pytest.approx(3 * ways), "of four prompts one has no picture"
        assert gate == CONCAT or told["visual rows"] < told["visual rows before"], "these pictures are of a few rows"
        assert gate != WEIGHT or {*branches} == {f"weight {branch}" for branch in WEIGHED}
        assert gate in (SELECT, WEIGHT) or branches[f"branch {'pool' if gate == CONCAT else gate}"] == 3


def test_gradients_reach_every_branch() -> None:
    drafter = specvlm(branches=("prune", "pool", "conv", "resampler")).train()
    given = {k: v.repeat(4, *[1] * (v.dim() - 1)) for k, v in rows("several").items()}
    drafter.choose = lambda *_: torch.arange(4)  # type: ignore[method-assign]
    steps = drafter(given["embeds"], given["features"], given["visual"], given["valid"], 2)
    sum(s.square().sum() for s in steps).backward()
    for name, weight in drafter.named_parameters():
        assert name.startswith("gate") or (weight.grad is not None and bool(weight.grad.abs().sum() > 0)), name
