"""Static trees: the published shapes as data, and the filling of a shape with tokens, by rank or by drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from reprlib import repr as briefly

import torch
from torch import Tensor

from mmspec.config import is_whole
from mmspec.modes import lasting
from mmspec.tree import Expand, chain, from_paths, in_order
from mmspec.types import NO_TOKEN, Tree

EXAMPLE, MOST = "[[0], [0, 0], [1]]", 4096  # an example for messages; largest number of nodes
DYNAMIC, CHAIN = "dynamic", "chain"  # EAGLE-2's growth, not a static shape; a chain of any depth
Paths = tuple[tuple[int, ...], ...]  # a user-defined shape: paths of child ranks
Children = dict[str, int]  # path of the parent, one digit per rank: number of its children

# EAGLE-1 (Li et al. 2024) and LANTERN++ (Park et al. 2025, arXiv 2502.06352), as their code lists them.
SHAPES: dict[str, Children] = {
    "chain": {"": 1, "0": 1, "00": 1, "000": 1, "0000": 1},
    "mc_sim_7b_63": {
        "": 4, "0": 3, "1": 2, "2": 2, "3": 1,
        "00": 3, "01": 2, "02": 2, "10": 1, "000": 3, "0000": 2,
    },
    "mc_sim_7b_63_balanced": {
        "": 3, "0": 3, "1": 3, "2": 2,
        "00": 3, "01": 2, "10": 2, "11": 2, "000": 3, "0000": 2,
    },
    "reverse_balanced_25": {
        "": 3, "0": 2, "1": 1, "2": 1,
        "00": 3, "01": 2, "10": 1, "000": 3, "001": 2, "0000": 4, "0001": 3,
    },
    "naive_extend_57": {
        "": 5, "0": 4, "1": 3, "2": 3, "3": 2, "4": 1,
        "00": 4, "01": 3, "02": 3, "03": 2, "10": 2, "11": 1, "20": 1,
        "000": 4, "001": 3, "002": 2, "003": 1, "010": 2, "011": 1, "020": 1,
        "0000": 3, "0001": 2, "0010": 2, "0011": 1, "0020": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Level:
    """The nodes of one depth: their parents, and which of them have children."""

    parents: Tensor  # [m], index among the expanded nodes of the level above
    ranks: Tensor  # [m]
    branches: int  # largest number of children of a parent
    inner: Tensor  # [k], indices within this level of the nodes with children


@dataclass(frozen=True)
class TreePlan:
    """A shape on a device."""

    tree: Tree  # [1, N]
    levels: tuple[Level, ...]

    @property
    def depth(self) -> int:
        return len(self.levels)


def own_paths(given: Paths) -> Paths:
    """The nodes below the root of a tree that the user gave as a list of paths, in order; prefixes may be left out.

    Raises ValueError: not a list of paths, or ranks with gaps.
    """
    lists = isinstance(given, Sequence) and all(isinstance(path, Sequence) and path for path in given)
    if not (lists and given and all(is_whole(rank, 0) for path in given for rank in path)):
        raise ValueError(
            f"tree must be a name or a list of paths of ranks ≥ 0, such as {EXAMPLE}; got {briefly(given)}"
        )
    paths = tuple(in_order(given)[1:])
    gaps = [[*path[:-1], path[-1] - 1] for path in paths if path[-1] and (*path[:-1], path[-1] - 1) not in {*paths}]
    if gaps:
        raise ValueError(f"the tree lacks {gaps[0]}: children have the ranks 0, 1, … without a gap; add it")
    if len(paths) >= MOST:
        raise ValueError(f"the tree has {len(paths)} paths; give fewer than {MOST}")
    return paths


def nodes(shape: Children) -> list[tuple[int, ...]]:
    """Paths of child ranks of all nodes below the root."""
    return [(*map(int, parent), rank) for parent, count in shape.items() for rank in range(count)]


def paths_of(tree: str | Paths) -> Sequence[tuple[int, ...]]:
    """The paths of a named or user-defined shape.

    Raises ValueError: an unknown name; the message lists the known ones.
    """
    if isinstance(tree, str) and tree not in SHAPES:
        raise ValueError(
            f"unknown tree {tree!r}; choose from {', '.join([DYNAMIC, *SHAPES])}, or give a list of paths: {EXAMPLE}"
        )
    return nodes(SHAPES[tree]) if isinstance(tree, str) else tree


@lru_cache(maxsize=32)
@lasting()
def plan(name: str | Paths, depth: int, device: torch.device) -> TreePlan:
    """A shape on a device; only a chain depends on `depth`, the others are as published or as the user gave them."""
    paths = [(0,) * depth] if name == CHAIN else paths_of(name)
    tree, ranks = from_paths(paths, device)
    if name == CHAIN:
        tree = chain(depth + 1, device)
    parent, at = tree.parents[0].tolist(), tree.depth[0].tolist()
    levels, expanded = [], [0]
    for level in range(1, max(at) + 1):
        here = [n for n in range(len(at)) if at[n] == level]
        inner = [n for n in here if n in parent[1:]]
        parents = torch.tensor([expanded.index(parent[n]) for n in here], device=device)
        places = torch.tensor([here.index(n) for n in inner], dtype=torch.long, device=device)
        levels.append(Level(parents, ranks[0, here], int(ranks[0, here].max()) + 1, places))
        expanded = inner
    return TreePlan(tree, tuple(levels))


def fill(
    first: Tensor, expand: Expand, shape: TreePlan, noise: Callable[[int], Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Tokens of a static tree: the likeliest of each node's distribution, by rank, or tokens drawn without replacement.

    All nodes of a level share one Gumbel noise. Only one of their parents can be accepted, so the tokens that are
    tested are still drawn from their stated distribution, and tokens that are never tested have no effect.

    Args:
        first: log-probabilities [B, V] after the root.
        expand: see `tree.grow`; here the frontier is the nodes of a level that have children.
        noise: gives [B, 1, V] for the tokens of level i ≥ 0 (their depth is i + 1); None: by rank.

    Returns:
        Tokens [B, N − 1] below the root, and if they were drawn, the logits [B, N, V] of the distribution that each was
        drawn from, which excludes its earlier siblings. A node without a possible token is NO_TOKEN.
    """
    log_p, tokens, distributions = first[:, None], [], [first[:, None]]  # the root's own entry is not used
    for depth, level in enumerate(shape.levels):
        score = log_p if noise is None else log_p + noise(depth)
        best, ids = score.topk(level.branches, -1)
        below = torch.where(best > -torch.inf, ids, NO_TOKEN)[:, level.parents, level.ranks]  # [B, m]
        tokens.append(below)
        if noise is not None:
            distributions.append(_remaining(log_p, ids, level, below == NO_TOKEN))
        if depth + 1 < shape.depth:
            log_p = expand(below[:, level.inner].clamp(min=0), level.parents[level.inner].expand(len(below), -1))
    return torch.cat(tokens, 1), torch.cat(distributions, 1) if noise is not None else None


def _remaining(log_p: Tensor, ids: Tensor, level: Level, hole: Tensor) -> Tensor:
    """The parent's distribution without the earlier siblings, [B, m, V]; flat for a `hole`, a node without a token."""
    distribution = log_p[:, level.parents]
    earlier = torch.arange(ids.shape[-1], device=ids.device) < level.ranks[:, None]  # [m, branches]
    drawn = torch.where(earlier, ids[:, level.parents], ids[:, level.parents, level.ranks][..., None])
    gone = torch.zeros_like(distribution, dtype=torch.bool).scatter_(2, drawn, earlier.expand_as(drawn))
    return distribution.masked_fill(gone, -torch.inf).masked_fill(hole[..., None], 0.0)
