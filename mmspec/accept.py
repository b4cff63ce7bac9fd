"""Testing a draft by a rule along one path from its root: `along_path`, for trees, chains and windows."""

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

ROOM = 2**28  # bytes that the distributions of a tree's nodes may take, for as many rows as are walked at once


def along_path(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor | None, spent: Tensor | None = None
) -> Acceptance:
    """Follow one path from the root as far as the rule allows, then draw the token that comes after it.

    Args:
        draft: tokens on a tree, with the distribution q they were drawn from (None: point masses).
        distribution: p after each node, [B, N, V].
        rule: what to keep. With `exact` the path and the next token together have the distribution p (to rounding).
        u: float64 (float32 on MPS) [B, N], uniform noise; the decision at a node uses the number of that node and no
            other. None where p is a point mass.
        spent: [B], like u, what the rows have cost before; counts against the rule's budget.

    Returns:
        Acceptance; `next_token` is drawn from p after the last accepted node, or from the residual where its children
            were rejected.
    """
    if distribution.is_point and distribution.logits is not None and rule.greedy is not None:
        return verify_greedy(draft, distribution, rule, spent)
    if distribution.is_point or (rule is exact and draft.q is None):  # all other rules agree where p is a point mass
        return verify_point_mass(draft, distribution, u)
    assert u is not None
    return (verify_chain if draft.tree.is_chain else verify_tree)(draft, distribution, rule, u, spent)


def verify_point_mass(draft: Draft, distribution: Categorical, u: Tensor | None) -> Acceptance:
    """Point-mass drafts under `exact`: draw one token from p at every node at once, and descend while it is a child."""
    tokens, tree = draft.tokens, draft.tree
    above = None if tree.is_chain else tree.ancestors
    if distribution.ids is not None:  # greedy: every distribution is a point mass and u does not matter
        return Acceptance(*ops.follow(distribution.ids, tokens, tree.parents, above))
    path = dispatch.verify_point_mass(distribution.logits, tokens, tree.parents, above, u)
    return Acceptance(path.accepted, path.count, path.last, path.token)


def verify_greedy(draft: Draft, distribution: Categorical, rule: Rule, spent: Tensor | None) -> Acceptance:
    """At temperature 0: the deepest node whose whole line stands, by itself or by the rule; what is not likeliest costs
    1. The likeliest token follows."""
    tokens, tree, best = draft.tokens, draft.tree, distribution.ids
    assert best is not None
    nodes, vocab = torch.arange(tree.size, device=tokens.device).expand_as(tokens), _vocabulary(draft, distribution)
    p, q = _masses(Categorical(distribution.logits), tree.parents, vocab), _masses(_drawn_from(draft), nodes, vocab)
    likeliest, root = best.gather(1, tree.parents) == tokens, tree.depth == 0
    trial = Trial(tokens.clamp(min=0), tree.depth, p, q)
    other = rule.greedy(trial) & (trial.p_x > 0) & ~likeliest & ~root  # type: ignore[misc]
    line = tree.ancestors.to(ops.widest(tokens.device))
    cost = (line @ other.to(line)[..., None])[..., 0]
    stands = root | ((likeliest | other) & (tokens != NO_TOKEN))
    if rule.budget is not None:
        stands = stands & (cost + (0.0 if spent is None else spent[:, None]) <= rule.budget)
    whole = (line @ (~stands).to(line)[..., None])[..., 0] == 0
    last = torch.where(whole, tree.depth, -1).argmax(1)
    accepted, at = gather_rows(tree.ancestors, last[:, None])[:, 0], last[:, None]
    count, follows = tree.depth.gather(1, at)[:, 0] + 1, best.gather(1, at)[:, 0]
    return Acceptance(accepted, count, last, follows, cost.gather(1, at)[:, 0])


def verify_chain(
    draft: Draft, distribution: Categorical, rule: Rule, u: Tensor, spent: Tensor | None = None
) -> Acceptance:
    """`verify_tree` on a chain: tests all drafted tokens at once, and computes one residual for each row."""
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
    drawn = _drawn(rule, distribution, last, q, tried.clamp(min=0), after, refused, noise, vocab)
    return Acceptance(accepted, count, last, drawn, charged)


def _drawn(
    rule: Rule, distribution: Categorical, last: Tensor, q: Categorical, x: Tensor, after: Tensor, refused: Tensor,
    noise: Tensor, vocab: int,
) -> Tensor:  # fmt: skip
    """The next token [B]: from p after node `last`, or where the draft x at `after` was refused, from its residual."""
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
    """On a tree: children are tested in turn; a rejection changes p to its residual, an acceptance descends.

    A rejection at chance f leaves u ≥ f, and (u − f)/(1 − f) is uniform again: one number is enough for a node.

    The residual that a node's r-th child is tested against depends on the children before it and on no random number.
    So all chances are computed first, for the r-th children of all nodes at once, and then all tests; only those on the
    accepted path count. The host knows the shape of the tree and reads nothing from the device.
    """
    vocab = _vocabulary(draft, distribution)
    line = torch.finfo(u.dtype).bits // 8 * vocab * max((1, *(draft.tree.families or (draft.tree.size,))))
    some = max(1, ROOM // line)  # rows
    parts = [slice(first, first + some) for first in range(0, len(u), some)]
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
    """`verify_tree`, all rows at once."""
    tree = draft.tree
    nodes, child = children(tree)  # [B, P], [B, P, K]
    real = (child > 0) & (_of(draft.tokens, child) != NO_TOKEN)
    p, strict, f, charge = _refused(draft, distribution, rule, nodes, child, real, vocab)
    if rule.budget is not None:
        before = _of(_before(tree, _by_node(tree, child, torch.where(real, charge, 0.0))), child)
        f = _afforded(rule, strict, f, before if spent is None else before + spent[:, None, None])
        charge = (f - strict).abs()
    noise, kept = u.gather(1, nodes), torch.zeros_like(real)
    for rank, chance in enumerate(torch.where(real, f, 0.0).unbind(2)):  # a hole takes nothing of the noise
        kept[..., rank] = noise < chance
        noise = ops.remaining(noise, chance)
    tested = real & (kept.cumsum(2) - kept.long() == 0)
    accepted, count, last = ops.standing(_by_node(tree, child, kept & tested), tree.ancestors)
    charged = None
    if rule.relaxed is not None:
        charge = torch.where(tested & accepted.gather(1, nodes)[..., None], charge, 0.0)
        charged = _by_node(tree, child, charge).cumsum(1)[:, -1]
    places = nodes == last[:, None]  # a leaf has no place among them
    inner, at = places.any(1), places.to(torch.uint8).argmax(1, keepdim=True)
    noise = torch.where(inner, noise.gather(1, at)[:, 0], u.gather(1, last[:, None])[:, 0])
    p = torch.where(inner[:, None], gather_rows(p, at)[:, 0], distribution.weights(last, vocab))
    return Acceptance(accepted, count, last, ops.categorical(p, noise), charged)


def _refused(
    draft: Draft, distribution: Categorical, rule: Rule, nodes: Tensor, child: Tensor, real: Tensor, vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left of the distribution [B, P, V] of each node once all its children were refused, and of every child
    [B, P, K] the chance to be kept when it is tested, strictly and by the rule, and what the rule costs for the
    test."""
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


def _before(tree: Tree, wanted: Tensor) -> Tensor:
    """Of what is wanted at each node [B, N]: the sum over the nodes that are tested before it is, [B, N]."""
    sooner = siblings(tree).tril()  # and itself
    tested = (tree.ancestors.float() @ sooner.float() > 0).tril(-1)  # its line, and the elder siblings of that
    return torch.where(tested, wanted[:, None], 0.0).cumsum(-1)[..., -1]


def _of(values: Tensor, nodes: Tensor) -> Tensor:
    """[B, P, K] of values [B, N]: those of the nodes [B, P, K]."""
    return values.gather(1, nodes.flatten(1)).view_as(nodes)


def _by_node(tree: Tree, child: Tensor, values: Tensor) -> Tensor:
    """Values [B, P, K] of children as [B, N]; those where there is no child must be zero."""
    return values.new_zeros(len(child), tree.size).scatter(1, child.flatten(1), values.flatten(1))


def chances(rule: Rule, trial: Trial) -> tuple[Tensor, Tensor]:
    """The chance to keep x strictly, and as the rule would have it; neither keeps what p excludes."""
    strict = rule.ratio(trial.p_x, trial.q_x)
    if rule.relaxed is None:
        return strict, strict
    return strict, torch.where(trial.p_x > 0, trial.once(rule.relaxed), 0.0)


def _afforded(rule: Rule, strict: Tensor, f: Tensor, spent: Tensor) -> Tensor:
    """The chance nearest to f that costs no more than `spent` leaves of the budget."""
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
    """V; for point masses alone, as much of it as is in use."""
    known = [each.logits.shape[-1] for each in (distribution, draft.q) if each is not None and each.logits is not None]
    if known:
        return known[0]
    return int(torch.stack([t.max() for t in (draft.tokens, distribution.ids) if t is not None]).max()) + 1
