"""Geometries: how a draft is walked with a rule. `along_path` serves trees, chains and windows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.rows import gather_rows
from mmspec.rules import Masses, Rule, Trial, exact
from mmspec.types import HOLE, Categorical, Draft, Law, Verdict


def along_path(draft: Draft, law: Law, rule: Rule, u: Tensor | None, spent: Tensor | None = None) -> Verdict:
    """Follow one path from the root as far as the rule allows, then draw the token that comes after it.

    Args:
        draft: tokens on a tree, with the law q they were drawn from (None: point masses).
        law: p after each node, [B, N, V].
        rule: what to keep. With `exact` the path and the next token together have the law p (to rounding).
        u: float64 (float32 on MPS) [B, N], uniform noise; the decision at a node uses the number of that node and no
            other. None where p is a point mass.
        spent: [B], like u, what the rows were charged before; counts against the rule's budget.

    Returns:
        Verdict; `token` is drawn from the law after the last kept node, or from what the refused ones left of it.
    """
    if law.is_point or (rule is exact and draft.law is None):  # all rules agree where p is a point mass
        return descend(draft, law, u)
    assert u is not None
    return (advance if draft.tree.is_chain else walk)(draft, law, rule, u, spent)


def descend(draft: Draft, law: Law, u: Tensor | None) -> Verdict:
    """Point-mass drafts under `exact`, all nodes at once: draw one token at every node, descend while it is a child."""
    tokens, tree = draft.tokens, draft.tree
    above = None if tree.is_chain else tree.ancestors
    if law.ids is not None:  # greedy: every law is a point mass and u does not matter
        return Verdict(*ops.follow(law.ids, tokens, tree.parents, above))
    found = dispatch.verify_point_mass(law.logits, tokens, tree.parents, above, u)
    return Verdict(found.stands, found.count, found.last, found.token)


def advance(draft: Draft, law: Law, rule: Rule, u: Tensor, spent: Tensor | None = None) -> Verdict:
    """`walk` on a chain, all nodes at once: the masses of the drafted tokens decide, and one residual a row is made."""
    tokens, N = draft.tokens, draft.tree.size
    x, nodes = tokens[:, 1:], torch.arange(N, device=tokens.device).expand_as(tokens)
    q, vocab = _drawn_from(draft), _vocabulary(draft, law)
    trial = Trial(x.clamp(min=0), nodes[:, 1:], _masses(law, nodes[:, :-1], vocab), _masses(q, nodes[:, 1:], vocab))
    strict, f = chances(rule, trial)
    if rule.relaxed is not None:
        wanted = torch.where(x == HOLE, 0.0, (f - strict).abs()).cumsum(1)
        before = pad(wanted, (1, 0))[:, :-1] + (0.0 if spent is None else spent[:, None])
        f, charge = _afforded(rule, trial, strict, f, before)
    match = torch.ones_like(tokens, dtype=torch.bool)
    match[:, 1:] = (u[:, :-1] < f) & (x != HOLE)
    stands, count, last = ops.standing(match, None)
    after = count.clamp(max=N - 1)
    refused = (count < N) & (tokens.gather(1, after[:, None])[:, 0] != HOLE)
    charged = None
    if rule.relaxed is not None:
        tested = stands[:, 1:] | (refused[:, None] & (nodes[:, 1:] == after[:, None]))
        charged = torch.where(tested, charge, 0.0).sum(1)
    noise, chance = u.gather(1, last[:, None])[:, 0], pad(f, (1, 0)).gather(1, after[:, None])[:, 0]
    noise = torch.where(refused, ops.remaining(noise, chance), noise)
    return Verdict(stands, count, last, _drawn(rule, law, last, q, after, refused, noise, vocab), charged)


def _drawn(
    rule: Rule, law: Law, last: Tensor, q: Law, after: Tensor, refused: Tensor, noise: Tensor, vocab: int
) -> Tensor:
    """The next token [B]: from p after node `last`, or where the draft at `after` was refused, from what p has left."""
    if law.logits is None or rule.residual is not ops.positive_residual:
        p = law.weights(last, vocab)
        return ops.categorical(torch.where(refused[:, None], rule.residual(p, q.weights(after, vocab)), p), noise)
    p, drafted = gather_rows(law.logits, last[:, None])[:, 0], after[:, None]
    if q.logits is not None:
        return dispatch.residual_sample(p, noise, q=gather_rows(q.logits, drafted)[:, 0], rows=refused)
    assert q.ids is not None
    return dispatch.residual_sample(p, noise, refused=q.ids.gather(1, drafted), rows=refused)


def walk(draft: Draft, law: Law, rule: Rule, u: Tensor, spent: Tensor | None = None) -> Verdict:
    """The definition: test the children of the current node one after the other; a refusal changes the law.

    A refusal at chance f leaves u ≥ f, and (u − f)/(1 − f) is uniform again: one number serves a whole node.
    """
    tokens, parents = draft.tokens, draft.tree.parents
    B, N = tokens.shape
    q_law, vocab = _drawn_from(draft), _vocabulary(draft, law)
    current = torch.zeros(B, dtype=torch.long, device=tokens.device)
    stands = torch.zeros(B, N, dtype=torch.bool, device=tokens.device)
    stands[:, 0] = True
    p, noise = law.weights(current, vocab), u[:, 0].clone()
    charged = torch.zeros_like(noise)
    for node in range(1, N):
        tested = (parents[:, node] == current) & (tokens[:, node] != HOLE)
        if not tested.any():
            continue
        here = torch.full_like(current, node)
        q = q_law.weights(here, vocab)
        trial = Trial(tokens[:, node].clamp(min=0), draft.tree.depth[:, node], Masses.of(p), Masses.of(q))
        strict, f = chances(rule, trial)
        if rule.relaxed is not None:
            f, charge = _afforded(rule, trial, strict, f, charged if spent is None else charged + spent)
            charged = torch.where(tested, charged + charge, charged)
        kept = tested & (noise < f)
        refused = tested & ~kept
        stands[:, node] = kept
        current = torch.where(kept, node, current)
        rest = rule.residual(p, q)
        p = torch.where(kept[:, None], law.weights(here, vocab), p)
        p = torch.where(refused[:, None], rest / rest.sum(-1, keepdim=True), p)
        noise = torch.where(kept, u[:, node], noise)
        noise = torch.where(refused, ops.remaining(noise, f), noise)
    token = ops.categorical(p, noise)
    return Verdict(stands, stands.sum(-1), current, token, None if rule.relaxed is None else charged)


def chances(rule: Rule, trial: Trial) -> tuple[Tensor, Tensor]:
    """The chance to keep x strictly, and as the rule would have it; neither keeps what p excludes."""
    strict = rule.ratio(trial.p_x, trial.q_x)
    if rule.relaxed is None:
        return strict, strict
    return strict, torch.where(trial.p_x > 0, rule.relaxed(trial), 0.0)


def _afforded(rule: Rule, trial: Trial, strict: Tensor, f: Tensor, spent: Tensor) -> tuple[Tensor, Tensor]:
    """The chance nearest to f that costs no more than `spent` leaves of the budget, and what it costs."""
    if rule.charge is not None:
        return f, rule.charge(trial)
    if rule.budget is not None:
        left = (rule.budget - spent).clamp(min=0)
        f = torch.minimum(torch.maximum(f, strict - left), strict + left)
    return f, (f - strict).abs()


def _masses(law: Law, nodes: Tensor, vocab: int) -> Masses:
    lines = None if law.logits is None else (law.logits, law.log_z, nodes)
    return Masses(partial(law.mass, nodes), partial(law.weights, nodes, vocab), lines)


def _drawn_from(draft: Draft) -> Law:
    return draft.law if draft.law is not None else Categorical(ids=draft.tokens)


def _vocabulary(draft: Draft, law: Law) -> int:
    """V; for point masses alone, as much of it as is in use."""
    known = [each.logits.shape[-1] for each in (law, draft.law) if each is not None and each.logits is not None]
    ids = [t.max() for t in (draft.tokens, law.ids) if t is not None]
    return known[0] if known else int(torch.stack(ids).max()) + 1
