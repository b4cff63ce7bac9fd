"""Rules: what each one does to the distribution of the output, in closed form, through the geometries and over whole
texts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from table_targets import CPU, Drawn, Holes, Nothing, TableModel, distance, excess, run
from torch import Tensor

from mmspec import loop
from mmspec.accept import along_path, chances, verify_chain, verify_point_mass, verify_tree
from mmspec.kernels import reference as ops
from mmspec.registry import RULES, resolve_rule
from mmspec.rules import Masses, Rule, Trial, exact, only
from mmspec.session import Row, Session
from mmspec.statistics import Stats
from mmspec.tree import chain, from_parents
from mmspec.types import NO_TOKEN, Categorical, Draft, Tree
from tests.core.test_core import BIASED, distributions, hostile_tree, output_of, random_parents, tv

V = 7
CODES = torch.randn(V, 3, generator=torch.Generator().manual_seed(3))
MONOTONE = [  # relaxed, with the ordinary residual, and never below min(1, p/q)
    "lantern(k=3, delta=0.3)",
    "lantern(k=3, lam=4.0)",
    "scaled(omega=1.7)",
    "scaled(omega=3.0, nu=0.4)",
    "pooled(cells=3)",
    "pooled(radius=0.8)",
    "typical(epsilon=0.1, delta=0.5)",
]
GSD = ["gsd(group=3)", "gsd(group=5, distance=1.2, gap=0.2)"]
GROUPED = ["grouped(cells=3)", "grouped(radius=0.8)"]
LANTERN = ["lantern(k=3, delta=0.3, residual='published')", "lantern(k=3, lam=4.0, residual='published')"]
ALL = ["exact", *MONOTONE, *GSD, *GROUPED, *LANTERN]


def rule_of(spec: str, budget: float | None = None, vocab: int = V) -> Rule:
    codes = CODES if vocab == V else torch.randn(vocab, 3, generator=torch.Generator().manual_seed(4))
    return resolve_rule(spec, codes, budget)


PAIRS = [distributions(seed, V) for seed in range(30)]


def weighed(rule: Rule, p: Tensor, q: Tensor, depth: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """For every token as the draft: the strict chance to keep it, the rule's, and the charge; [V] each."""
    n = len(p)
    trial = Trial(torch.arange(n), torch.full((n,), depth), Masses.of(p.expand(n, n)), Masses.of(q.expand(n, n)))
    strict, f = chances(rule, trial)
    return strict, f, (f - strict).abs() if rule.charge is None else rule.charge(trial)


def outcome(rule: Rule, p: Tensor, q: Tensor, depth: int = 1) -> Tensor:
    """The distribution of the output, Σ_x q(x)[f(x)·1_x + (1 − f(x))·residual]."""
    f, n = weighed(rule, p, q, depth)[1], len(p)
    trial = Trial(torch.arange(n), torch.full((n,), depth), Masses.of(p.expand(n, n)), Masses.of(q.expand(n, n)))
    rest = rule.residual(trial)
    return q * f + (q * (1 - f)) @ (rest / rest.sum(-1, keepdim=True))


# -- in closed form --------------------------------------------------------------------------------------------------


def test_exact_is_the_law_p() -> None:
    for p, q in PAIRS:
        assert tv(outcome(exact, p, q), p) < 1e-15


@pytest.mark.parametrize("spec", MONOTONE)
def test_distance_is_the_acceptance_that_was_gained(spec: str) -> None:
    gains = []
    for (p, q), depth in itertools.product(PAIRS, (1, 3)):
        strict, f, charge = weighed(rule_of(spec), p, q, depth)
        assert (f >= strict).all() and (f <= 1).all()
        gain = float((q * (f - strict)).sum())
        assert abs(tv(outcome(rule_of(spec), p, q, depth), p) - gain) < 1e-12
        assert abs(float((q * charge).sum()) - gain) < 1e-12 and gain <= tv(p, q) + 1e-12
        gains.append(gain)
    assert max(gains) > 0.05, "the rule does relax"


@pytest.mark.parametrize("spec", GROUPED)
def test_grouped_keeps_the_law_of_cells(spec: str) -> None:
    rule = rule_of(spec)
    cell = ops.partition(CODES, **({"cells": 3} if "cells" in spec else {"radius": 0.8}))
    assert 1 < int(cell.max()) + 1 < V
    apart = []
    for p, q in PAIRS:
        distribution, charge = outcome(rule, p, q), weighed(rule, p, q)[2]
        assert (ops.cell_sums(distribution, cell) - ops.cell_sums(p, cell)).abs().max() < 1e-14
        inside = 0.0
        for c in range(int(cell.max()) + 1):
            member = (cell == c) & (p > 0)
            P, Q = p[member].sum(), q[member].sum()
            if P > 0:
                inside += float(torch.minimum(P, Q)) * tv(p[member] / P, q[member] / Q)
        assert abs(tv(distribution, p) - inside) < 1e-14 and abs(float((q * charge).sum()) - inside) < 1e-14
        apart.append(tv(distribution, p))
    assert max(apart) > 0.05


@pytest.mark.parametrize("spec", ALL)
def test_nothing_that_p_excludes_comes_out(spec: str) -> None:
    for p, q in PAIRS[::3]:
        assert (p == 0).any()
        assert (weighed(rule_of(spec), p, q)[1][p == 0] == 0).all()
        assert outcome(rule_of(spec), p, q)[p == 0].sum() == 0


@pytest.mark.parametrize("spec", GSD)
def test_gsd_as_published_refuses_more_than_it_must(spec: str) -> None:
    """Its windows are no partition; |f − min(1, p/q)| still bounds the distance. `pooled` never falls below."""
    below = 0
    for p, q in PAIRS:
        strict, f, charge = weighed(rule_of(spec), p, q)
        below += int((f < strict - 1e-12).sum())
        away = tv(outcome(rule_of(spec), p, q), p)
        more, less = float((q * (f - strict).clamp(min=0)).sum()), float((q * (strict - f).clamp(min=0)).sum())
        assert abs(float((q * charge).sum()) - more - less) < 1e-12 and away <= max(more, less) + 1e-12
        assert less > more or abs(away - more) < 1e-12
    assert below > 0


def test_gsd_is_its_formula() -> None:
    """min(1, Σp/Σq) over a window of the order of p, token by token; codes are normalised, input embeddings are not."""
    table = 3 * torch.randn(V, 5, generator=torch.Generator().manual_seed(8))
    embedded = "gsd(group=7, distance=5.0, space='embeddings')"
    for rule, points, far, half, gap in (
        (rule_of(GSD[1]), torch.nn.functional.normalize(CODES, dim=-1), 1.2, 2, 0.2),
        (resolve_rule(embedded, CODES, None, table), table, 5.0, 3, 2.0),
    ):
        near = (points[:, None] - points).norm(dim=-1) <= far
        assert 0.2 < near.float().mean() < 0.8
        for p, q in PAIRS:
            order = sorted(range(V), key=lambda x: (float(p[x]), x))
            f = weighed(rule, p, q)[1]
            for x in range(V):
                at = order.index(x)
                window = [y for y in order[max(0, at - half) : at + half + 1] if p[y] > 0 and near[x, y]]
                C = [y for y in window if abs(p[x] - p[y]) < gap]
                want = min(1.0, float(p[C].sum() / q[C].sum())) if p[x] > 0 else 0.0
                assert abs(float(f[x]) - want) < 1e-12
    with pytest.raises(ValueError, match=r"input embeddings \[V, H\] of the codes are needed"):
        resolve_rule(embedded, CODES)


def test_typical_is_its_formula() -> None:
    """Tokens above min(ε, δ·exp(−H)) stand for sure, all others as under `exact`, token by token."""
    sure = 0
    for p, q in PAIRS:
        entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
        strict, f, _ = weighed(rule_of("typical(epsilon=0.1, delta=0.5)"), p, q)
        for x in range(V):
            above = float(p[x]) > min(0.1, 0.5 * math.exp(-entropy))
            assert float(f[x]) == (1.0 if above else float(strict[x]))
            sure += above and float(strict[x]) < 1
    assert sure > 10


def test_delta_bounds_one_draft_that_is_not_random_and_no_other() -> None:
    rule, drawn = rule_of("lantern(k=6, delta=0.1)"), []
    for p, q in PAIRS:
        for x in range(V):
            point = torch.zeros(V, dtype=torch.float64)
            point[x] = 1
            assert tv(outcome(rule, p, point), p) <= 0.1 + 1e-12
        drawn.append(tv(outcome(rule, p, q), p))
    assert max(drawn) > 0.15


@pytest.mark.parametrize("lam", [1.2, 2.0, 5.0])
def test_lam_bounds_every_draft(lam: float) -> None:
    for p, q in PAIRS:
        kept = float(torch.minimum(p, q).sum())
        assert tv(outcome(rule_of(f"lantern(k=6, lam={lam})"), p, q), p) <= min((lam - 1) * kept, tv(p, q)) + 1e-12


def test_scaled_relaxes_early_drafts_more_and_never_refuses_more_than_exact() -> None:
    p, q = distributions(1, V)
    gains = [tv(outcome(rule_of("scaled(omega=2.0, nu=0.3)"), p, q, depth), p) for depth in (1, 2, 3, 4, 9)]
    assert gains == sorted(gains, reverse=True) and gains[0] > gains[1] > 0
    assert gains[-1] < 1e-15, "ω would be below 1"


@pytest.mark.parametrize("spec", LANTERN)
def test_the_residual_of_lantern_as_published(spec: str) -> None:
    """Against the released loops: a refusal takes all k + 1 neighbours away; the charge bounds what is lost by it."""
    rule, strictly, near = rule_of(spec), rule_of(spec.replace(", residual='published'", "")), ops.nearest(CODES, 4)
    k, more = 3, 0.0
    for p, drawn in PAIRS:
        for x in range(V):
            point = torch.nn.functional.one_hot(torch.tensor(x), V).double()
            for q in (point, drawn):
                wanted, fresh = p.clone(), q.clone()
                limit = 0.3 if "delta" in spec else 3.0 * float(p[x])
                borrowed = max([m for m in range(k + 1) if float(p[near[x, :m].long()].sum()) <= limit])
                if q is point:
                    wanted[x] = 0
                    if borrowed:
                        wanted[near[x].long()] = 0
                else:
                    if borrowed:
                        fresh[near[x].long()] = 0
                    wanted = (p - fresh).clamp(min=0)
                trial = Trial(torch.tensor(x), torch.tensor(1), Masses.of(p), Masses.of(q))
                rest = rule.residual(trial)
                if wanted.sum() > 0:  # where nothing is left, the authors draw any token, whether p excludes it or not
                    assert torch.allclose(rest / rest.sum(), wanted / wanted.sum(), rtol=0, atol=1e-14)
                else:
                    assert torch.equal(rest, p)
                if q is point or x == 0:
                    strict, f, charge = weighed(rule, p, q)
                    away = tv(outcome(rule, p, q), p)
                    assert torch.equal(f, weighed(strictly, p, q)[1]) and away <= float((q * charge).sum()) + 1e-12
                    more = max(more, away - float((q * (f - strict)).sum()))
    assert more > 0.1


@pytest.mark.parametrize("spec", ["lantern(k=3, delta=0.3)", "lantern(k=3, lam=4.0)"])
def test_greedy_lantern_stands_where_the_published_one_does(spec: str) -> None:
    """Token by token: x takes the mass of its neighbours, and stands if it is the likeliest then."""
    rule, near, other = rule_of(spec), ops.nearest(CODES, 3), 0
    assert rule.greedy is not None
    for p, _ in PAIRS:
        for x in range(V):
            c, limit = [0.0], 0.3 if "delta" in spec else 3.0 * float(p[x])
            for y in near[x].tolist():
                c.append(c[-1] + float(p[y]))
            held = p.clone()
            held[x] += max(m for m in c if m <= limit)
            trial = Trial(torch.tensor(x), torch.tensor(1), Masses.of(p), Masses.of(p))
            assert bool(rule.greedy(trial)) == bool(held[x] >= p.max())
            other += bool(rule.greedy(trial)) and int(p.argmax()) != x
    assert other > 10


def test_a_greedy_path_costs_its_tokens_that_are_not_likeliest() -> None:
    """Two branches: one likeliest for a step, one that stands by its neighbours for two; a budget takes the first."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 5, V, generator=g)
    rule = Rule("all", exact.ratio, exact.residual, greedy=lambda trial: torch.ones_like(trial.x, dtype=torch.bool))
    best = logits.argmax(-1)
    tree = from_parents(torch.tensor([[0, 0, 0, 2, 1]]), 2)
    second = int((best[0, 0] + 1) % V)
    tokens = torch.tensor([[0, int(best[0, 0]), second, int((best[0, 2] + 1) % V), NO_TOKEN]])
    draft, p = Draft(tokens, tree), Categorical(logits, best)
    found = along_path(draft, p, rule, None, torch.zeros(1))
    assert found.accepted.tolist() == [[True, False, True, True, False]] and int(found.count) == 3
    assert float(found.tv_cost) == 2 and int(found.next_token) == int(best[0, 3])
    for budget, spent, node in ((2.0, 0.0, 3), (2.0, 0.5, 1), (1.0, 0.0, 1)):
        found = along_path(draft, p, replace(rule, budget=budget), None, torch.full((1,), spent))
        assert found.last.tolist() == [node] and float(found.tv_cost) == (2 if node == 3 else 0)
    found = along_path(draft, Categorical(ids=best), rule, None)
    assert found.accepted.tolist() == [[True, True, False, False, False]], "nothing is known of other tokens"


def test_a_rule_for_some_tokens_is_exact_for_the_others() -> None:
    some = torch.tensor([True, False, True, True])  # and none beyond
    for spec in (*MONOTONE, *GSD):
        rule = only(rule_of(spec), some)
        for p, q in PAIRS[:9]:
            (strict, f, charge), whole = weighed(rule, p, q), weighed(rule_of(spec), p, q)[1]
            here = torch.tensor([0, 2, 3])
            assert torch.equal(f[here], whole[here])
            f[here], charge[here] = strict[here], 0
            assert torch.equal(f, strict) and not charge.any()
    assert only(rule_of(GROUPED[0]), some) is exact and only(rule_of(LANTERN[0]), some) is exact
    greedy = only(rule_of(MONOTONE[1]), some).greedy
    assert greedy is not None
    trial = Trial(torch.arange(V), torch.ones(V), Masses.of(torch.ones(V, V) / V), Masses.of(torch.ones(V, V) / V))
    assert greedy(trial).tolist() == [True, False, True, True, False, False, False]


# -- through the geometries ------------------------------------------------------------------------------------------


GRID = 4000


def siblings_of(p: Tensor, q: Tensor | None, tokens: tuple[int, ...], rule: Rule) -> tuple[Tensor, Tensor]:
    """`output_of` siblings that are drawn without replacement from q."""
    if q is not None:
        q = q.repeat(len(tokens) + 1, 1)
        for rank in range(1, len(tokens)):
            q[rank + 1, list(tokens[:rank])] = 0
    return output_of(p, q, tokens, rule, GRID)


@pytest.mark.parametrize("spec", ALL)
def test_a_chain_does_what_the_closed_form_says(spec: str) -> None:
    p, q = distributions(4, 5)
    rule, distribution, charge = rule_of(spec, vocab=5), torch.zeros(5, dtype=torch.float64), 0.0
    for x in range(5):
        each, cost = siblings_of(p, q, (x,), rule)
        distribution, charge = distribution + q[x] * each, charge + float(q[x] * cost)
    assert tv(distribution, outcome(rule, p, q)) < 5 / GRID
    want = float((q * weighed(rule, p, q)[2]).sum())
    assert abs(charge - want) < 1e-9 and (spec in GSD or abs(want - tv(outcome(rule, p, q), p)) < 1e-9)


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.every(2)
def test_charges_bound_the_distance_among_siblings(spec: str, drawn: bool) -> None:
    """Three siblings, drawn without replacement, or certain: mean charge ≥ distance from p, both 0 for `exact`."""
    p, q = distributions(5, 4)
    rule, distribution, charge = rule_of(spec, vocab=4), torch.zeros(4, dtype=torch.float64), 0.0
    for tokens in itertools.permutations(range(4), 3) if drawn else [(2, 0, 1)]:
        weight, left = 1.0, 1.0
        for x in tokens if drawn else ():
            weight, left = weight * float(q[x]) / left, left - float(q[x])
        each, cost = siblings_of(p, q if drawn else None, tokens, rule)
        distribution, charge = distribution + weight * each, charge + weight * float(cost)
    away = tv(distribution, p)
    assert away <= charge + 4 / GRID
    assert (away < 4 / GRID and charge == 0) if rule.lossless else charge > 0


def random_draft(seed: int, drawn: bool, tree: Tree) -> tuple[Draft, Categorical, Tensor, Tensor]:
    """A draft with holes, drawn from its q or certain, p, of which every other is as top-k leaves it, noise, and what
    was spent before."""
    g = torch.Generator().manual_seed(seed)
    B, N = tree.parents.shape
    tokens = torch.randint(0, V, (B, N), generator=g)
    tokens[:, 1:][torch.rand(B, N - 1, generator=g) < 0.1] = NO_TOKEN
    p = 2 * torch.randn(B, N, V, generator=g, dtype=torch.float64)
    q = (p.roll(1, 1) + torch.randn(B, N, V, generator=g, dtype=torch.float64)) if drawn else None
    if seed % 2:
        p = p.masked_fill(p < p.topk(4).values[..., -1:], -math.inf)
    u, spent = torch.rand(2, B, N, generator=g, dtype=torch.float64)
    return Draft(tokens, tree, None if q is None else Categorical(q)), Categorical(p), u, 0.2 * spent[:, 0]


def random_chains(seed: int, drawn: bool) -> tuple[Draft, Categorical, Tensor, Tensor]:
    return random_draft(seed, drawn, chain(1 + seed % 7, CPU).expand(200))


@pytest.mark.parametrize("budget", [None, 0.0, 0.15])
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.every(4)
def test_advance_is_walk_on_the_same_noise(spec: str, budget: float | None) -> None:
    if ("grouped" in spec or "published" in spec) and budget is not None:
        pytest.skip("its cost is not only the acceptance that it gains")
    rule, length = rule_of(spec, budget), 0
    for seed, drawn in itertools.product(range(1, 21), (True, False)):
        draft, distribution, u, spent = random_chains(seed, drawn)
        spent = torch.zeros_like(spent) if budget is None else spent
        fast, slow = verify_chain(draft, distribution, rule, u, spent), verify_tree(draft, distribution, rule, u, spent)
        point = [verify_point_mass(draft, distribution, u)] if rule is exact and not drawn else []
        for other, name in itertools.product([slow, *point], ("accepted", "count", "last", "next_token")):
            assert torch.equal(getattr(fast, name), getattr(other, name)), name
        assert (fast.tv_cost is None) == (slow.tv_cost is None) == rule.lossless
        assert fast.tv_cost is None or torch.allclose(fast.tv_cost, slow.tv_cost, rtol=0, atol=1e-14)
        length = max(length, int(fast.count.max()))
    assert length > 3


@pytest.mark.parametrize("spec", [*MONOTONE, *GSD])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.every(2)
def test_a_row_is_never_charged_more_than_its_budget(spec: str, tree: bool) -> None:
    """Rounds on random drafts until the budget is gone; from then on, and with budget=0, the rule is `exact`."""
    rule, none = rule_of(spec, 0.15), rule_of(spec, 0.0)
    spent = torch.zeros(200, dtype=torch.float64)
    for seed in range(20):
        draft, distribution, u, _ = random_chains(6 + 7 * seed, drawn=True)
        if tree:
            shape = from_parents(torch.tensor([[0, 0, 0, 0, 1, 1, 2]]), 3).expand(200)
            draft = replace(draft, tree=shape)
        before, acceptance = spent, along_path(draft, distribution, rule, u, spent)
        strict = along_path(draft, distribution, exact, u)
        spent = spent + acceptance.tv_cost
        assert (acceptance.tv_cost >= 0).all() and float(spent.max()) <= 0.15 + 1e-12
        broke = before >= 0.15
        frugal = along_path(draft, distribution, none, u)
        assert (frugal.tv_cost == 0).all() and torch.equal(frugal.accepted, strict.accepted)
        assert torch.equal(frugal.next_token, strict.next_token)
        assert torch.equal(acceptance.next_token[broke], strict.next_token[broke])
    assert (spent >= 0.15 - 1e-12).any() and broke.any()


def test_a_point_mass_leaves_nothing_to_relax() -> None:
    """Greedy targets and seed-exact ones: every rule keeps exactly what p is, on chains and trees, by every path."""
    for spec, seed, branches in itertools.product(ALL, (3, 4), (False, True)):
        draft, distribution, u, _ = random_chains(seed, drawn=True)
        best = distribution.logits[..., :-1].argmax(-1)  # that there is one token more is q's to tell
        tokens = draft.tokens.clamp(max=V - 2).where(torch.rand(best.shape) < 0.3, best)
        tree = from_parents(random_parents(*best.shape), best.shape[1]) if branches else draft.tree
        draft, point = replace(draft, tokens=tokens, tree=tree), Categorical(ids=best)
        fast, slow = along_path(draft, point, rule_of(spec), u), verify_tree(draft, point, rule_of(spec), u)
        assert torch.equal(fast.accepted, slow.accepted) and torch.equal(fast.next_token, slow.next_token)


def test_broken_laws_beyond_the_path_change_nothing() -> None:
    draft, distribution, u, _ = random_chains(6, drawn=True)
    for spec in ALL:
        sound = along_path(draft, distribution, rule_of(spec), u)
        beyond = torch.arange(7) > sound.count[:, None]  # the first refused node still needs its q, and its parent's p
        p = distribution.logits.masked_fill((beyond | (torch.arange(7) == sound.count[:, None]))[..., None], math.nan)
        q = draft.q.logits.masked_fill(beyond[..., None], math.nan)
        broken = along_path(replace(draft, q=Categorical(q)), Categorical(p), rule_of(spec), u)
        assert torch.equal(sound.next_token, broken.next_token) and torch.equal(sound.accepted, broken.accepted)
        assert sound.tv_cost is None or torch.equal(sound.tv_cost, broken.tv_cost)


# -- over whole texts ------------------------------------------------------------------------------------------------

SIBLINGS = [(0, 0), (0, 1), (1, 0), (2,)]
ROWS = 12000


class Certain(Drawn):
    """The tree of `hostile_tree`, whose tokens are not drawn."""

    def propose(self, session: Session, target: TableModel) -> Draft:
        return hostile_tree(session.pending, session.emitted)


@pytest.mark.parametrize(
    ("kind", "drafts"), [(Drawn, 3), (Drawn, SIBLINGS), (Holes, 3), (Holes, SIBLINGS), (Certain, 7)]
)
def test_exact_has_the_law_of_whole_texts(kind: type[Drawn], drafts: list[tuple[int, ...]] | int) -> None:
    model = TableModel()
    samples, rows, session = run(model, kind(model, drafts), exact, ROWS)
    assert excess(samples, model.joint(), 4) < 5
    assert session.stats.tokens_per_target_call > 1.3
    assert session.stats.lossless and session.stats.spent == 0 and all(row.spent == 0 for row in rows)


@pytest.mark.parametrize(
    ("error", "drafts"),
    [("q is misstated", 3), ("q is misstated", SIBLINGS), ("residual is p", 3), ("ratio too large", 3)],
)
def test_a_planted_error_is_seen(error: str, drafts: list[tuple[int, ...]] | int) -> None:
    model, rule = TableModel(), BIASED.get(error, exact)
    samples, _, _ = run(model, Drawn(model, drafts, honest=rule is not exact), rule, 3 * ROWS)
    assert excess(samples, model.joint(), 4) > 50


def test_one_number_for_all_nodes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableModel()
    monkeypatch.setattr(
        loop, "along_path", lambda draft, p, rule, u, *spent: along_path(draft, p, rule, u[:, :1].expand_as(u), *spent)
    )
    samples, _, _ = run(model, Certain(model, 7), exact, ROWS)
    assert excess(samples, model.joint(), 4) > 50


@pytest.mark.parametrize(
    "spec", ["lantern(k=2, lam=3.0)", "scaled(omega=2.0)", "typical(epsilon=0.1, delta=0.5)", "pooled(cells=2)"]
)
@pytest.mark.parametrize("drafts", [3, SIBLINGS], ids=["chain", "siblings"])
@pytest.mark.every(8)
def test_charges_bound_the_distance_of_whole_texts(spec: str, drafts: list[tuple[int, ...]] | int) -> None:
    model = TableModel()
    noise = distance(run(model, Drawn(model, drafts), exact, ROWS)[0], model.joint(), 4)
    for budget in (None, 0.05):
        samples, rows, session = run(model, Drawn(model, drafts), rule_of(spec, budget, vocab=4), ROWS, seed=1)
        spent = [row.spent for row in rows]
        assert distance(samples, model.joint(), 4) - noise < sum(spent) / ROWS + 0.01
        assert (excess(samples, model.joint(), 4) > 20) == (budget is None), "the relaxation is seen where it is large"
        assert abs(session.stats.spent - sum(spent)) < 1e-6 and not session.stats.lossless
        assert budget is None or max(spent) <= budget + 1e-12


def test_a_rows_charge_goes_where_the_row_goes() -> None:
    def session(first: int, n: int) -> Session:
        rule = rule_of("scaled(omega=2.0)")
        made = Session([Row([0], 1, 9, seed=first + b, rule=rule) for b in range(n)], CPU)
        made.spent = torch.arange(first, first + n, dtype=torch.float64)
        made.cache = made.memory = Nothing()
        return made

    one, two = session(0, 4), session(4, 2)
    one.select([3, 1])
    one.admit(two)
    assert one.spent.tolist() == [3, 1, 4, 5]
    rows = one.rows
    rows[1].done = rows[2].done = True
    one.retire()
    assert one.spent.tolist() == [3, 5] and [row.spent for row in rows] == [0, 1, 4, 0]
    assert one.stats.spent == 5 and not one.stats.lossless and "charged 5.000" in str(one.stats)
    total = Stats()
    total.add(one.stats)
    assert total.spent == 5 and not total.lossless and Stats().lossless


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL)
def test_a_rules_name_makes_the_same_rule(spec: str) -> None:
    rule = rule_of(spec)
    again = resolve_rule(rule.name, CODES)
    assert again.name == rule.name and resolve_rule(rule) is rule
    assert {s.split("(")[0] for s in ALL} == set(RULES)
    p, q = PAIRS[1]
    assert torch.equal(outcome(rule, p, q), outcome(again, p, q))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("lantrn(k=3)", "unknown rule 'lantrn'; choose from exact, lantern, scaled"),
        ("lantern", "lantern needs k; its parameters are k, delta, lam, residual"),
        ("lantern(k=3)", "delta or lam, exactly one"),
        ("lantern(k=3, delta=0.1, lam=2.0)", "exactly one"),
        ("lantern(k=0, lam=2.0)", "k must be a whole number from 1 to V − 1 = 6; got 0"),
        ("lantern(k=7, lam=2.0)", "got 7"),
        ("lantern(k=2.5, lam=2.0)", "got 2.5"),
        ("lantern(k=3, delta=0.0)", "delta must be in"),
        ("lantern(k=3, delta=1.5)", "got 1.5"),
        ("lantern(k=3, lam=1.0)", "lam must be above 1"),
        ("scaled(omega=0.9)", "omega must be at least 1; got 0.9"),
        ("scaled(omega=2.0, nu=-1.0)", "nu must be at least 0"),
        ("scaled(omega=2.0, mu=1)", "scaled has no parameter mu; its parameters are omega, nu"),
        ("scaled(2.0)", "must have the form"),
        ("scaled(omega='2')", "omega must be at least 1; got '2'"),
        ("lantern(k=3, lam=2.0, residual='own')", "residual must be one of ordinary, published; got 'own'"),
        ("gsd(group=3, space='pixels')", "space must be one of codes, embeddings; got 'pixels'"),
        ("scaled(omega=__import__('os'))", "must have the form"),
        ("scaled(omega=None)", "omega must be at least 1; got None"),
        ("scaled(", "must have the form"),
        ("exact(k=1)", "exact has no parameter k; its parameters are none"),
        ("typical(epsilon=0.3)", "typical needs delta; its parameters are epsilon, delta"),
        ("typical(epsilon=1.5, delta=0.3)", "epsilon must be in (0, 1]; got 1.5"),
        ("gsd(group=0)", "group must be"),
        ("gsd(group=5, gap=2.0)", "gap must be"),
        ("grouped", "radius or cells"),
        ("grouped(cells=8)", "from 1 to V = 7"),
        ("pooled(radius=3.0)", "radius must be"),
    ],
)
def test_a_wrong_rule_says_what_is_allowed(spec: str, says: str) -> None:
    with pytest.raises(ValueError) as raised:
        resolve_rule(spec, CODES)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "spec", ["lantern(k=3, lam=2.0)", "grouped(cells=2)", "pooled(cells=2)", "gsd(group=3, distance=1.0)"]
)
def test_a_rule_that_compares_codes_asks_for_them(spec: str) -> None:
    with pytest.raises(ValueError, match=r"a codebook \[V, c\] is needed"):
        resolve_rule(spec)


def test_budgets() -> None:
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match="budget must be"):
            resolve_rule("scaled(omega=2.0)", budget=wrong)
    with pytest.raises(ValueError, match="use pooled"):
        rule_of("grouped(cells=3)", 0.5)
    assert resolve_rule("exact", budget=1.0) is exact
    assert rule_of("pooled(cells=3)", 0.5).budget == 0.5 and rule_of("pooled(cells=3)").budget is None


# -- the arithmetic --------------------------------------------------------------------------------------------------


def test_gumbel_noise_draws_from_the_law_and_depends_on_seed_and_position_alone() -> None:
    p, _ = distributions(1, V)
    seeds, position = torch.arange(300), torch.arange(100).expand(300, -1)
    noise = ops.gumbel(seeds, position, V)
    drawn = (p.log() + noise).argmax(-1).flatten()
    assert excess(drawn[:, None], p, V) < 4 and noise.isfinite().all()
    assert torch.equal(noise[7:8, 20:30], ops.gumbel(seeds[7:8], torch.arange(20, 30)[None], V))
    pairs = torch.stack([drawn[:-1], drawn[1:]], 1)
    assert excess(pairs, (p[:, None] * p).flatten(), V) < 4


def test_streams_of_one_seed_share_nothing() -> None:
    seeds, counter = torch.arange(200)[:, None], torch.arange(200)
    tags = (ops.COINS, ops.GUMBEL, ops.FRESH, ops.COUPLE)
    streams = [ops.uniform(ops.stream(seeds, tag), counter) for tag in tags]
    assert torch.equal(streams[0], ops.uniform(seeds, counter))
    for a, b in itertools.combinations(streams, 2):
        assert not torch.isin(a, b).any() and abs(float((a * b).mean()) - 0.25) < 5 * 0.22 / 200


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_nearest_are_the_nearest(chunk: int) -> None:
    unit = torch.nn.functional.normalize(CODES, dim=-1)
    found = ops.nearest(5 * CODES, V - 1, chunk)
    for x in range(V):
        others = sorted((y for y in range(V) if y != x), key=lambda y: float((unit[x] - unit[y]).norm()))
        assert found[x].tolist() == others


@pytest.mark.parametrize("radius", [0.0, 0.3, 0.7, 2.0])
def test_cells_are_balls(radius: float) -> None:
    codes = torch.nn.functional.normalize(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    cell = ops.partition(3 * codes, radius=radius)
    same = cell[:, None] == cell
    assert float(torch.cdist(codes, codes)[same].max()) <= 2 * radius + 1e-3
    assert sorted(set(cell.tolist())) == list(range(int(cell.max()) + 1))
    assert int(cell.max()) + 1 == {0.0: 200, 2.0: 1}.get(radius, int(cell.max()) + 1)


@pytest.mark.parametrize("cells", [1, 2, 17, 200])
def test_as_many_cells_as_asked_for(cells: int) -> None:
    codes = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    assert len(set(ops.partition(codes, cells=cells).tolist())) == cells
    assert len(set(ops.partition(codes[:1].expand(9, -1), cells=5).tolist())) == 1, "equal codes stay together"


def test_borrowed_is_the_longest_prefix_within_the_bound() -> None:
    masses, bounds = torch.rand(500, 6, dtype=torch.float64) / 6, torch.rand(500, dtype=torch.float64)
    got = ops.borrowed(masses, bounds)
    for row, bound, have in zip(masses.tolist(), bounds.tolist(), got.tolist(), strict=True):
        assert have == max(c for c in itertools.accumulate(row, initial=0.0) if c <= bound)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 30])
def test_rank_window_is_a_slice_of_the_order(size: int) -> None:
    p = torch.randint(0, 5, (60, 9), generator=torch.Generator().manual_seed(0)).double() / 20  # with many ties
    x = torch.arange(60) % 9
    ids, inside = ops.rank_window(p, x, size)
    for b in range(60):
        order = sorted(range(9), key=lambda y: (float(p[b, y]), y))
        at = order.index(int(x[b]))
        window = [y for y in order[max(0, at - size // 2) : at + size - size // 2] if p[b, y] > 0]
        got = ids[b][inside[b]].tolist()
        assert (int(x[b]) in got) == (p[b, x[b]] > 0) and len(set(got)) == len(got) == len(window)
        assert sorted(float(p[b, y]) for y in got) == [float(p[b, y]) for y in window]
