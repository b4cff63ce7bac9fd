"""Verification of drafts: which drafted tokens a rule accepts, along one path from the root of a chain or tree."""

from __future__ import annotations

from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.rules import Masses, Rule, Trial, exact, ordinary
from mmspec.tree import bounds, children, siblings
from mmspec.types import NO_TOKEN, Acceptance, Categorical, Draft, Tree, gather_rows, join, select

ROOM = 2**28  # bytes that the distributions of tree nodes may take; `verify_tree` splits the batch to stay below it


def along_path(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor | None, spent: Tensor | None = None
) -> Acceptance:
    """Accept one path from the root as far as the rule allows, then draw the token that comes after it.

    Args:
        draft: tokens on a tree, with the distribution q they were drawn from (None: point masses).
        distribution: p after each node, [B, N, V].
        rule: decides what to accept. With `exact`, path and next token together have the distribution p (to rounding).
        u: float64 (float32 on MPS) [B, N], uniform noise; the decision at a node uses that node's number only. None if
            p is a point mass.
        spent: [B], dtype of u: cost of the rows in earlier rounds, which counts against the rule's budget.

    Returns:
        Acceptance; `next_token` is drawn from p after the last accepted node, or from the residual if that node's
            children were rejected.
    """
    if distribution.is_point and distribution.logits is not None and rule.greedy is not None:
        return verify_greedy(draft, distribution, rule, spent)
    if distribution.is_point or (rule is exact and draft.q is None):  # all rules are equal if p is a point mass
        return verify_point_mass(draft, distribution, u)
    assert u is not None
    return (verify_chain if draft.tree.is_chain else verify_tree)(draft, distribution, rule, u, spent)


def verify_point_mass(draft: Draft, distribution: Categorical, u: Tensor | None) -> Acceptance:
    """Point-mass drafts under `exact`: draw one token from p at every node, and descend while a child has it."""
    tokens, tree = draft.tokens, draft.tree
    above = None if tree.is_chain else tree.ancestors
    if distribution.ids is not None:  # greedy: every distribution is a point mass and u does not matter
        return Acceptance(*ops.follow(distribution.ids, tokens, tree.parents, above))
    return Acceptance(*dispatch.verify_point_mass(distribution.logits, tokens, tree.parents, above, u))


def verify_greedy(draft: Draft, distribution: Categorical, rule: Rule, spent: Tensor | None) -> Acceptance:
    """At temperature 0: accept up to the deepest node on whose path each token is the likeliest or allowed by the rule.
    A token that is not the likeliest costs 1. The next token is the likeliest one."""
    tokens, tree, best = draft.tokens, draft.tree, distribution.ids
    assert best is not None
    nodes, vocab = torch.arange(tree.size, device=tokens.device).expand_as(tokens), _vocabulary(draft, distribution)
    p, q = _masses(Categorical(distribution.logits), tree.parents, vocab), _masses(_drawn_from(draft), nodes, vocab)
    likeliest, root = best.gather(1, tree.parents) == tokens, tree.depth == 0
    trial = Trial(tokens.clamp(min=0), tree.depth, p, q)
    other = rule.greedy(trial) & (trial.p_x > 0) & ~likeliest & ~root  # type: ignore[misc]
    ancestors = tree.ancestors.to(ops.widest(tokens.device))
    cost = (ancestors @ other.to(ancestors)[..., None])[..., 0]
    passes = root | ((likeliest | other) & (tokens != NO_TOKEN))
    if rule.budget is not None:
        passes = passes & (cost + (0.0 if spent is None else spent[:, None]) <= rule.budget)
    whole = (ancestors @ (~passes).to(ancestors)[..., None])[..., 0] == 0
    last = torch.where(whole, tree.depth, -1).argmax(1)
    accepted, at = gather_rows(tree.ancestors, last[:, None])[:, 0], last[:, None]
    count, follows = tree.depth.gather(1, at)[:, 0] + 1, best.gather(1, at)[:, 0]
    return Acceptance(accepted, count, last, follows, cost.gather(1, at)[:, 0])


def verify_chain(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor, spent: Tensor | None = None
) -> Acceptance:
    """`verify_tree` on a chain: test all drafted tokens at once, and compute one residual for each row."""
    tokens, N = draft.tokens, draft.tree.size
    x, nodes = tokens[:, 1:], torch.arange(N, device=tokens.device).expand_as(tokens)
    q, vocab = _drawn_from(draft), _vocabulary(draft, distribution)
    trial = Trial(
        x.clamp(min=0), nodes[:, 1:], _masses(distribution, nodes[:, :-1], vocab), _masses(q, nodes[:, 1:], vocab)
    )
    strict, f = chances(rule, trial)
    if rule.relaxed is not None:
        wanted = torch.where(x == NO_TOKEN, 0.0, (f - strict).abs()).cumsum(1)
        before = pad(wanted, (1, 0))[:, :-1] + (0.0 if spent is None else spent[:, None])
        f = _afforded(rule, strict, f, before)
        charge = _charge(rule, trial, strict, f)
    match = torch.ones_like(tokens, dtype=torch.bool)
    match[:, 1:] = (u[:, :-1] < f) & (x != NO_TOKEN)
    accepted, count, last = ops.standing(match, None)
    after = count.clamp(max=N - 1)
    tried = tokens.gather(1, after[:, None])[:, 0]
    refused = (count < N) & (tried != NO_TOKEN)
    charged = None
    if rule.relaxed is not None:
        tested = accepted[:, 1:] | (refused[:, None] & (nodes[:, 1:] == after[:, None]))
        charged = torch.where(tested, charge, 0.0).sum(1)
    noise, chance = u.gather(1, last[:, None])[:, 0], pad(f, (1, 0)).gather(1, after[:, None])[:, 0]
    noise = torch.where(refused, ops.remaining(noise, chance), noise)
    next_token = _next_token(rule, distribution, last, q, tried.clamp(min=0), after, refused, noise, vocab)
    return Acceptance(accepted, count, last, next_token, charged)


def _next_token(
    rule: Rule, distribution: Categorical, last: Tensor, q: Categorical, x: Tensor, after: Tensor, refused: Tensor,
    noise: Tensor, vocab: int,
) -> Tensor:  # fmt: skip
    """The next token [B]: drawn from p after node `last`, or from the residual if draft x at `after` was rejected."""
    if distribution.logits is None or rule.residual is not ordinary:
        p = distribution.weights(last, vocab)
        rest = rule.residual(Trial(x, after, Masses.of(p), Masses.of(q.weights(after, vocab))))
        return ops.categorical(torch.where(refused[:, None], rest, p), noise)
    p, drafted = gather_rows(distribution.logits, last[:, None])[:, 0], after[:, None]
    if q.logits is not None:
        drawn: Tensor = dispatch.residual_sample(p, noise, q=gather_rows(q.logits, drafted)[:, 0], rows=refused)
    else:
        assert q.ids is not None
        drawn = dispatch.residual_sample(p, noise, refused=q.ids.gather(1, drafted), rows=refused)
    return drawn


def verify_tree(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor, spent: Tensor | None = None
) -> Acceptance:
    """On a tree: test children in turn; a rejection replaces p by its residual, an acceptance descends to the child.

    After a rejection with chance f, u ≥ f and (u − f)/(1 − f) is uniform again, so a node needs only one number.

    The residual that a node's r-th child is tested against depends on the children before it, not on the noise. So all
    chances are computed first, for the r-th children of all nodes at once, and then all tests; only those on the
    accepted path count. The host knows the shape of the tree and reads nothing from the device.
    """
    vocab = _vocabulary(draft, distribution)
    row_bytes = torch.finfo(u.dtype).bits // 8 * vocab * max((1, *(draft.tree.families or (draft.tree.size,))))
    rows = max(1, ROOM // row_bytes)
    parts = [slice(first, first + rows) for first in range(0, len(u), rows)]
    if len(parts) == 1:
        return _verify_tree(draft, distribution, rule, u, spent, vocab)
    return reduce(
        partial(join, fills={}),
        [
            _verify_tree(select(draft, part), select(distribution, part), rule, u[part], select(spent, part), vocab)
            for part in parts
        ],
    )


def _verify_tree(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor, spent: Tensor | None, vocab: int
) -> Acceptance:
    """`verify_tree` for all rows at once."""
    tree = draft.tree
    nodes, child = children(tree)  # [B, P], [B, P, K]
    real = (child > 0) & (_of(draft.tokens, child) != NO_TOKEN)
    p, strict, f, charge = _chances_in_tree(draft, distribution, rule, nodes, child, real, vocab)
    if rule.budget is not None:
        before = _of(_before(tree, _by_node(tree, child, torch.where(real, charge, 0.0))), child)
        f = _afforded(rule, strict, f, before if spent is None else before + spent[:, None, None])
        charge = (f - strict).abs()
    noise, kept = u.gather(1, nodes), torch.zeros_like(real)
    for rank, chance in enumerate(torch.where(real, f, 0.0).unbind(2)):  # chance 0 leaves the noise as it is
        kept[..., rank] = noise < chance
        noise = ops.remaining(noise, chance)
    tested = real & (kept.cumsum(2) - kept.long() == 0)
    accepted, count, last = ops.standing(_by_node(tree, child, kept & tested), tree.ancestors)
    charged = None
    if rule.relaxed is not None:
        charge = torch.where(tested & accepted.gather(1, nodes)[..., None], charge, 0.0)
        charged = _by_node(tree, child, charge).cumsum(1)[:, -1]
    places = nodes == last[:, None]  # false everywhere if `last` is a leaf
    inner, at = places.any(1), places.to(torch.uint8).argmax(1, keepdim=True)
    noise = torch.where(inner, noise.gather(1, at)[:, 0], u.gather(1, last[:, None])[:, 0])
    p = torch.where(inner[:, None], gather_rows(p, at)[:, 0], distribution.weights(last, vocab))
    return Acceptance(accepted, count, last, ops.categorical(p, noise), charged)


def _chances_in_tree(
    draft: Draft, distribution: Categorical, rule: Rule, nodes: Tensor, child: Tensor, real: Tensor, vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each node's residual [B, P, V] after the rejection of all its children, and for every child [B, P, K] its chance
    to be accepted when it is tested, under `exact` and under the rule, and the cost of that test."""
    q_law, p, x = _drawn_from(draft), distribution.weights(nodes, vocab), _of(draft.tokens, child).clamp(min=0)
    depth = _of(draft.tree.depth, child)
    strict = p.new_zeros(child.shape)
    f, charge = (strict if rule.relaxed is None else torch.zeros_like(strict) for _ in range(2))
    for rank, many in enumerate(draft.tree.families or bounds(draft.tree.size)):
        at = (slice(None), slice(many), rank)
        now, q = p[:, :many], q_law.weights(child[at], vocab)
        trial = Trial(x[at], depth[at], Masses.of(now), Masses.of(q))
        strict[at], chance = chances(rule, trial)
        if rule.relaxed is not None:
            f[at], charge[at] = chance, _charge(rule, trial, strict[at], chance)
        rest = trial.once(rule.residual)
        torch.where(real[at][..., None], rest / rest.sum(-1, keepdim=True), now, out=now)
    return p, strict, f, charge


def _before(tree: Tree, values: Tensor) -> Tensor:
    """For each node the sum of `values` [B, N] over the nodes that are tested before it, [B, N]."""
    elder = siblings(tree).tril()  # elder siblings, and the node itself
    tested = (tree.ancestors.float() @ elder.float() > 0).tril(-1)  # the node's ancestors and their elder siblings
    return torch.where(tested, values[:, None], 0.0).cumsum(-1)[..., -1]


def _of(values: Tensor, nodes: Tensor) -> Tensor:
    """Values [B, N] at nodes [B, P, K]."""
    return values.gather(1, nodes.flatten(1)).view_as(nodes)


def _by_node(tree: Tree, child: Tensor, values: Tensor) -> Tensor:
    """Values [B, P, K] of children scattered to their nodes, [B, N]; entries without a child must be zero."""
    return values.new_zeros(len(child), tree.size).scatter(1, child.flatten(1), values.flatten(1))


def chances(rule: Rule, trial: Trial) -> tuple[Tensor, Tensor]:
    """The chance to accept x under the strict ratio, and under the rule; both are 0 where p(x) = 0."""
    strict = rule.ratio(trial.p_x, trial.q_x)
    if rule.relaxed is None:
        return strict, strict
    return strict, torch.where(trial.p_x > 0, trial.once(rule.relaxed), 0.0)


def _afforded(rule: Rule, strict: Tensor, f: Tensor, spent: Tensor) -> Tensor:
    """The chance nearest to f whose cost fits into what is left of the budget after `spent`."""
    if rule.budget is None:
        return f
    left = (rule.budget - spent).clamp(min=0)
    return torch.minimum(torch.maximum(f, strict - left), strict + left)


def _charge(rule: Rule, trial: Trial, strict: Tensor, f: Tensor) -> Tensor:
    return (f - strict).abs() if rule.charge is None else rule.charge(trial)


def _masses(distribution: Categorical, nodes: Tensor, vocab: int) -> Masses:
    lines = None if distribution.logits is None else (distribution.logits, distribution.log_z, nodes)
    return Masses(partial(distribution.mass, nodes), partial(distribution.weights, nodes, vocab), lines)


def _drawn_from(draft: Draft) -> Categorical:
    return draft.q if draft.q is not None else Categorical(ids=draft.tokens)


def _vocabulary(draft: Draft, distribution: Categorical) -> int:
    """V; if p and q are point masses, the largest token in use plus 1."""
    sizes = [each.logits.shape[-1] for each in (distribution, draft.q) if each is not None and each.logits is not None]
    if sizes:
        return sizes[0]
    return int(torch.stack([t.max() for t in (draft.tokens, distribution.ids) if t is not None]).max()) + 1
