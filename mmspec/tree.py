"""Draft trees: chains, static trees from a list of paths, and EAGLE-2's dynamic growth, all on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from mmspec.modes import lasting
from mmspec.types import Draft, Tree

_WORST = -1e9  # replaces log 0 and NaN, so that a broken drafter still gives a well-formed tree


@lru_cache(maxsize=64)
@lasting()
def chain(size: int, device: torch.device) -> Tree:
    """One path of `size` nodes, the root included; [1, size]."""
    index = torch.arange(size, device=device)
    parents = (index - 1).clamp(min=0)
    return Tree(parents[None], index[None], (index[:, None] >= index)[None], True, (size - 1,) if size > 1 else ())


def lone(tokens: Tensor) -> Draft:
    """An empty draft: only the root; tokens [B, 1]."""
    return Draft(tokens, chain(1, tokens.device).expand(len(tokens)))


def from_paths(paths: Sequence[Sequence[int]], device: torch.device) -> tuple[Tree, Tensor]:
    """A static tree from paths of child ranks, the format of EAGLE-1, Medusa and LANTERN; prefixes may be left out.

    Args:
        paths: e.g. `[(0,), (1,), (0, 0)]`: the best child, the second best, and the best child's best child.

    Returns:
        The tree [1, N] and the rank [1, N] of each node among its siblings (0 for the root).

    Raises:
        ValueError: a rank below zero, or an empty list.
    """
    order = in_order(paths)
    where = {node: i for i, node in enumerate(order)}
    parents = torch.tensor([[where[node[:-1]] for node in order]], device=device)
    ranks = torch.tensor([[node[-1] if node else 0 for node in order]], device=device)
    children = Counter(node[:-1] for node in order[1:]).values()
    families = tuple(sum(n > rank for n in children) for rank in range(max(children)))
    return replace(from_parents(parents, max(map(len, order))), families=families), ranks


def in_order(paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The path of every node of `from_paths` in the order of the nodes; the root's is ().

    Raises:
        ValueError: as `from_paths`.
    """
    nodes = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    if not nodes or min(min(node) for node in nodes) < 0:
        raise ValueError(f"a static tree needs paths of ranks ≥ 0, such as [(0,), (0, 0), (1,)]; got {list(paths)!r}")
    return [(), *sorted(nodes, key=lambda node: (len(node), node))]


def from_parents(parents: Tensor, depth: int) -> Tree:
    """The tree with the given parents.

    Args:
        parents: int64 [B, N]; the root is its own parent, and parents come before their children.
        depth: an upper bound of the tree's depth (a Python number, so that nothing is read from the device).
    """
    B, N = parents.shape
    ancestors = torch.eye(N, dtype=torch.bool, device=parents.device).expand(B, N, N)
    up = parents
    for _ in range(max(1, (depth - 1).bit_length() + 1)):  # pointer doubling: 1, 2, 4, … generations
        reach = ancestors.gather(1, up[:, :, None].expand(B, N, N))
        ancestors = ancestors | reach
        up = up.gather(1, up)
    return Tree(parents, ancestors.sum(-1) - 1, ancestors)


def bounds(size: int, width: int | None = None, depth: int | None = None) -> tuple[int, ...]:
    """`Tree.families` of any tree of `size` nodes with at most `width` children per node and at most `depth` levels."""
    width = size - 1 if width is None else min(width, size - 1)
    inner = size - 1 if depth is None else min(1 + (depth - 1) * width, size - 1)
    return tuple(min(inner, (size - 1) // (rank + 1)) for rank in range(width))


def siblings(tree: Tree) -> Tensor:
    """Which nodes share a parent, bool [B, N, N]; a node is a sibling of itself, the root of none."""
    alike = tree.parents[:, :, None] == tree.parents[:, None, :]
    return alike & (tree.depth > 0)[:, :, None] & (tree.depth > 0)[:, None]


def children(tree: Tree) -> tuple[Tensor, Tensor]:
    """The nodes that have children, those with the most first, and their children in order; no device read.

    Returns:
        Nodes [B, P] and the children [B, P, K] of each, 0 where there are fewer. P and K follow from `families` (from
        `bounds` if the tree has none): all nodes with more than r children are among the first families[r] nodes.
    """
    families = bounds(tree.size) if tree.families is None else tree.families
    parents, P, K = tree.parents, max((1, *families)), len(families)
    B, N = parents.shape
    index, rank = torch.arange(N, device=parents.device), siblings(tree).tril(-1).sum(-1)
    counts = torch.zeros_like(parents).scatter_add(1, parents[:, 1:], torch.ones_like(parents[:, 1:]))
    order = counts.argsort(dim=1, descending=True, stable=True)
    place = torch.zeros_like(order).scatter(1, order, index.expand(B, N)).gather(1, parents) * K + rank
    table = parents.new_zeros(B, P * K).scatter(1, place[:, 1:], index[1:].expand(B, -1))
    return order[:, :P], table.view(B, P, K)


Expand = Callable[[Tensor, Tensor], Tensor]


def marginal(log_p: Tensor) -> tuple[Tensor, Expand]:
    """`first` and `expand` for `grow`, from distributions [B, depth, V] that do not depend on the tokens above."""
    levels = iter(range(1, log_p.shape[1]))

    def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
        return log_p[:, next(levels)][:, None].expand(-1, tokens.shape[1], -1)

    return log_p[:, 0], expand


def grow(first: Tensor, expand: Expand, width: int, depth: int, size: int) -> tuple[Tensor, Tree]:
    """EAGLE-2's dynamic tree (Li et al. 2024, §4): expand the most likely frontier, then keep the best of all nodes.

    Scores are sums of log-probabilities. A child never scores more than its parent and comes after it, so a stable
    descending sort keeps every parent of a kept child, ties included. Nodes are in this order, the best first: the
    first nodes of a larger tree are the smaller tree.

    Args:
        first: log-probabilities [B, V] after the root.
        expand: given the frontier's tokens [B, width] and, for each, the index [B, width] in the previous frontier it
            continues (zeros at first), returns log-probabilities [B, width, V] after each.
        width: branches per node and size of the frontier (`top_k`).
        depth: the longest path below the root, ≥ 1.
        size: nodes in the result, the root included; at most 1 + width + (depth − 1)·width².

    Returns:
        Tokens [B, size − 1] of the nodes below the root, and the tree [B, size].
    """
    scores, tokens = _best(first, width)  # [B, k]
    frontier_scores, frontier_tokens = scores, tokens
    came_from = torch.zeros_like(tokens)
    pool_scores, pool_tokens, frontiers = [scores], [tokens], []  # frontiers: their indices within each level
    for level in range(1, depth):
        log_p = expand(frontier_tokens, came_from)
        child_scores, child_tokens = _best(log_p, width)  # [B, k, k]
        child_scores = (frontier_scores[:, :, None] + child_scores).flatten(1)
        child_tokens = child_tokens.flatten(1)
        pool_scores.append(child_scores)
        pool_tokens.append(child_tokens)
        if level + 1 < depth:
            frontier_scores, chosen = child_scores.sort(dim=1, descending=True, stable=True)
            frontier_scores, chosen = frontier_scores[:, :width], chosen[:, :width]
            frontier_tokens, came_from = child_tokens.gather(1, chosen), chosen // width
            frontiers.append(chosen)
    # The levels' offsets in the pool are added only here, so that each level runs the same code and compiles once.
    frontiers = [torch.arange(width, device=first.device).expand_as(tokens), *frontiers][: depth - 1]
    starts = [0, *range(width, width + depth * width**2, width**2)][: depth - 1]
    parents = [(start + ids).repeat_interleave(width, 1) for start, ids in zip(starts, frontiers, strict=True)]
    parents = [torch.full_like(tokens, -1), *parents]
    return _keep(torch.cat(pool_scores, 1), torch.cat(pool_tokens, 1), torch.cat(parents, 1), width, depth, size)


def _best(log_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    values, tokens = log_p.float().topk(width, -1)
    return values.nan_to_num(nan=_WORST, posinf=0.0, neginf=_WORST).clamp(max=0.0), tokens


def _keep(
    scores: Tensor, tokens: Tensor, parents: Tensor, width: int, depth: int, size: int
) -> tuple[Tensor, Tree]:  # fmt: skip
    """The `size − 1` best nodes of the pool under a root; `parents` are indices into the pool, −1 for the root."""
    B, pool = scores.shape
    if size - 1 > pool:
        raise ValueError(
            f"a tree of {size} nodes does not fit into width and depth, which give at most {pool + 1}; lower size"
        )
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : size - 1]
    place = torch.zeros(B, pool + 1, dtype=torch.long, device=scores.device)  # pool index + 1 → node; the root → 0
    place = place.scatter(1, kept + 1, torch.arange(1, size, device=scores.device).expand(B, -1))
    node_parents = place.gather(1, parents.gather(1, kept) + 1)
    root = torch.zeros(B, 1, dtype=torch.long, device=scores.device)
    tree = from_parents(torch.cat([root, node_parents], 1), depth)
    return tokens.gather(1, kept), replace(tree, families=bounds(size, width, depth))
