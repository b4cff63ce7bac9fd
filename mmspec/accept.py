"""Geometries: how a draft is walked with a rule. `along_path` serves trees, chains and windows."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.kernels import reference as ops
from mmspec.rules import exact
from mmspec.types import HOLE, Draft, Law, Rule, Verdict

_BELOW_ONE = 1 - 2.0**-53


def along_path(draft: Draft, law: Law, rule: Rule, u: Tensor) -> Verdict:
    """Follow one path from the root as far as the rule allows, then draw the token that comes after it.

    Args:
        draft: tokens on a tree, with the law q they were drawn from (None: point masses).
        law: p after each node, [B, N, V].
        rule: what to keep. With `exact` the path and the next token together have the law p (to rounding).
        u: float64 [B, N], uniform noise; the decision at a node uses the number of that node and no other.

    Returns:
        Verdict; `token` is drawn from the law after the last kept node, or from what the refused ones left of it.
    """
    if rule is exact and draft.law is None:
        return descend(draft, law, u)
    return walk(draft, law, rule, u)


def descend(draft: Draft, law: Law, u: Tensor) -> Verdict:
    """Point-mass drafts under `exact`, all nodes at once: draw one token at every node, descend while it is a child.

    The draw at a node is the inverse CDF of p in the order "children first, in their order, then the vocabulary", so
    only the children's masses are needed until the path ends; then the rest of u draws from what they left.
    """
    tokens, tree = draft.tokens, draft.tree
    if law.ids is not None:  # greedy: every law is a point mass and u does not matter
        match = law.ids.gather(1, tree.parents) == tokens
        stands, count, last = _path(match & ~_repeated(draft), draft)
        return Verdict(stands, count, last, law.ids.gather(1, last[:, None])[:, 0])
    mass = law.mass(tree.parents, tokens) * ~_repeated(draft)
    low = 0.0 if tree.is_chain else ops.sibling_mass(mass, tree.siblings)
    noise = u.gather(1, tree.parents)
    stands, count, last = _path((low <= noise) & (noise < low + mass), draft)
    # The next token: p at the last node without its children, drawn with what is left of that node's noise.
    children = (tree.parents == last[:, None]) & (tokens != HOLE)
    children[:, 0] = False
    weights = law.weights(last)
    refused = torch.zeros_like(weights).scatter_add_(1, tokens.clamp(min=0), children.to(weights.dtype))
    left = torch.where(refused > 0, 0.0, weights)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, weights)  # rounding may leave nothing
    taken = torch.where(children, mass, 0.0).sum(-1)
    rest = (u.gather(1, last[:, None])[:, 0] - taken) / (1 - taken)
    return Verdict(stands, count, last, ops.categorical(left, rest.clamp(0, _BELOW_ONE)))


def _repeated(draft: Draft) -> Tensor:
    """[B, N] bool: an earlier sibling proposes the same token, so this node can never be reached."""
    if draft.tree.is_chain:
        return torch.zeros_like(draft.tokens, dtype=torch.bool)
    return (draft.tree.siblings & (draft.tokens[:, :, None] == draft.tokens[:, None, :])).any(-1)


def _path(match: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes whose whole line of ancestors matched, how many, and the deepest; siblings exclude each other."""
    match[:, 0] = True
    stands = (match[:, None, :] | ~draft.tree.ancestors).all(-1)
    depth = torch.where(stands, draft.tree.depth, -1)
    return stands, stands.sum(-1), depth.argmax(-1)


def walk(draft: Draft, law: Law, rule: Rule, u: Tensor) -> Verdict:
    """The definition: test the children of the current node one after the other; a refusal changes the law.

    A refusal at chance f leaves u ≥ f, and (u − f)/(1 − f) is uniform again: one number serves a whole node.
    """
    tokens, parents = draft.tokens, draft.tree.parents
    B, N = tokens.shape
    rows = torch.arange(B, device=tokens.device)
    vocab = _vocabulary(draft, law)
    current = torch.zeros(B, dtype=torch.long, device=tokens.device)
    stands = torch.zeros(B, N, dtype=torch.bool, device=tokens.device)
    stands[:, 0] = True
    p, noise = law.weights(current, vocab), u[:, 0].clone()
    for node in range(1, N):
        x = tokens[:, node]
        tested = (parents[:, node] == current) & (x != HOLE)
        x = x.clamp(min=0)
        if draft.law is None:
            q = torch.zeros_like(p).scatter_(1, x[:, None], 1.0)
        else:
            q = draft.law.weights(torch.full_like(current, node), vocab)
        f = rule.ratio(p[rows, x], q[rows, x])
        kept = tested & (noise < f)
        refused = tested & ~kept
        stands[:, node] = kept
        current = torch.where(kept, node, current)
        rest = rule.residual(p, q)
        rest = rest / rest.sum(-1, keepdim=True)
        p = torch.where(kept[:, None], law.weights(torch.full_like(current, node), vocab), p)
        p = torch.where(refused[:, None], rest, p)
        noise = torch.where(kept, u[:, node], noise)
        noise = torch.where(refused, ((noise - f) / (1 - f)).clamp(0, _BELOW_ONE), noise)
    return Verdict(stands, stands.sum(-1), current, ops.categorical(p, noise))


def _vocabulary(draft: Draft, law: Law) -> int:
    """V; for point masses alone, as much of it as is in use."""
    known = [each.logits.shape[-1] for each in (law, draft.law) if each is not None and each.logits is not None]
    ids = [t.max() for t in (draft.tokens, law.ids) if t is not None]
    return known[0] if known else int(torch.stack(ids).max()) + 1
