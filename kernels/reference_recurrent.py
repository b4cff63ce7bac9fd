"""Definitions for layers with a recurrent state: all nodes of a draft's tree in one forward, and the commit of a path.

A layer's state is a matrix S [K, V]; a node decays it by e^g, adds k⊗u to it and reads the result with q. On a tree
node i sees only the writes of its ancestors j, each decayed by e^(G_i − G_j), where G is the decay summed along the
node's path. So one triangular matrix represents the tree, no state is stored per node, and the state after any node is
a weighted sum of the writes on its path. For a chain this is the chunked form of the gated delta rule (Yang et al.
2024, arXiv 2412.06464, §3.3) and of state space duality (Dao and Gu 2024, arXiv 2405.21060, §6).
"""

from __future__ import annotations

import torch
from torch import Tensor


def path_decay(g: Tensor, ancestors: Tensor) -> Tensor:
    """G [B, H, n, …], the decay summed from the root to each node.

    Args:
        g: log decay of each node, [B, H, n], or [B, H, n, K] if every channel of the keys has its own.
        ancestors: bool [B, n, n], a node is its own ancestor.
    """
    if g.shape[2] == 1:
        return g
    above = ancestors.to(g.dtype)
    return g @ above.transpose(1, 2) if g.dim() == 3 else above[:, None] @ g


def _faded(x: Tensor, G: Tensor) -> Tensor:
    """x [B, H, n, K] times e^G."""
    return x * (G if G.dim() == 4 else G[..., None]).exp()


def _reads(queries: Tensor, k: Tensor, G: Tensor, ancestors: Tensor) -> Tensor:
    """Σ_d a_id · k_jd · e^(G_i − G_j), [B, H, T, n, n], zero if j is not an ancestor of i; a are the `queries`, T for
    each node, [B, H, T, n, K]."""
    if k.shape[2] == 1:
        return (queries * k[:, :, None]).sum(-1, keepdim=True)
    shape = ancestors[:, None] if G.dim() == 3 else ancestors[:, None, :, :, None]
    decay = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(~shape, -torch.inf).exp()
    if G.dim() == 4:
        return torch.einsum("bhtik,bhjk,bhijk->bhtij", queries, k, decay)
    return (queries.flatten(2, 3) @ k.transpose(-1, -2)).view(*queries.shape[:4], -1) * decay[:, :, None]


def recurrent_tree(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, G: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor]:
    """The read o [B, H, n, V] and the write u [B, H, n, V] of each node.

    Under the delta rule u_i = β_i (v_i − S_iᵀ k_i) with the state S_i before node i: one triangular system for all
    nodes; without `beta` a node writes its v. A single node, as in a plain step, needs no system.

    Args:
        q, k: [B, H, n, K].
        v: [B, H, n, V].
        beta: [B, H, n], or None.
        G: the result of `path_decay`.
        state: [B, H, K, V], before the root; it is read once.
        ancestors: bool [B, n, n]; parents come before their children.
    """
    queries = q[:, :, None] if beta is None else torch.stack([q, k], 2)
    twice = G if beta is None else torch.cat([G, G], 2)
    before = (_faded(queries.flatten(2, 3), twice) @ state).view(*queries.shape[:4], -1)
    reads = _reads(queries, k, G, ancestors)
    if beta is None:
        u = v
    else:
        u = (v - before[:, :, 1]) * beta[..., None]
        if k.shape[2] > 1:  # transposed, since the solver works by columns and then copies nothing
            system = (reads[:, :, 1] * beta[..., None]).transpose(-1, -2)
            solved = torch.linalg.solve_triangular(
                system, u.transpose(-1, -2), upper=True, left=False, unitriangular=True
            )
            u = solved.transpose(-1, -2)
    return before[:, :, 0] + reads[:, :, 0] @ u, u


def recurrent_fold(state: Tensor, k: Tensor, u: Tensor, G: Tensor, path: Tensor, last: Tensor) -> None:
    """Update `state` [B, H, K, V] in place to the end of an accepted path: decay it, and add the decayed writes of the
    path's nodes.

    Args:
        k, u: the writes of the nodes, [B, H, n, K] and [B, H, n, V].
        G: the result of `path_decay`.
        path: bool [B, n], the accepted nodes; a row without any keeps its state.
        last: int64 [B], the last of them.
    """
    wide = [1] * (G.dim() - 2)
    end = G.take_along_dim(last.view(-1, 1, *wide), 2) * path.any(1).view(-1, 1, *wide)
    weight = (end - G).masked_fill(~path.view(len(path), 1, -1, *wide[1:]), -torch.inf).exp()
    fade = end[..., None] if G.dim() == 3 else end.transpose(2, 3)
    faded = k * (weight if G.dim() == 4 else weight[..., None])
    state.mul_(fade.exp()).flatten(0, 1).baddbmm_(faded.transpose(-1, -2).flatten(0, 1), u.flatten(0, 1))


def conv_windows(parents: Tensor, depth: Tensor, width: int) -> Tensor:
    """Indices of the last `width` inputs of each node of a tree [B, n], oldest first, int64 [B, n, width], into the
    `width` inputs before the root followed by those of the n nodes."""
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    windows = []
    for back in range(width):
        windows.append(torch.where(depth >= back, width + node, width - (back - depth)))
        node = parents.gather(1, node)
    return torch.stack(windows[::-1], -1)


def tree_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor) -> Tensor:
    """A causal depthwise convolution over every path of a tree, [B, C, n].

    Args:
        x: inputs of the nodes, [B, C, n].
        state: the last W ≥ k inputs before the root, [B, C, W].
        weight: [C, k].
        bias: [C], or None.
        windows: the result of `conv_windows` for W.
    """
    (B, C, n), k = x.shape, weight.shape[-1]
    inputs = torch.cat([state.to(x.dtype).transpose(1, 2), x.transpose(1, 2)], 1)  # rows of C, which are gathered whole
    first = torch.arange(B, device=x.device)[:, None, None] * inputs.shape[1]
    picked = inputs.flatten(0, 1).index_select(0, (windows[..., -k:] + first).flatten()).view(B, n, k, C)
    out = (picked.to(weight.dtype) * weight.transpose(0, 1)).sum(2)
    return (out if bias is None else out + bias).transpose(1, 2)


def kept_inputs(kept: Tensor, count: Tensor, width: int) -> Tensor:
    """Indices of the last `width` inputs after an accepted path, int64 [B, width], as in `conv_windows`.

    Args:
        kept: [B, m], the path's nodes in order; entries from `count` on are not used.
        count: int64 [B].
    """
    place = count[:, None] + torch.arange(-width, 0, device=kept.device)  # on the path; negative before the root
    return width + torch.where(place >= 0, kept.gather(1, place.clamp(min=0)), place)


def conv_fold(x: Tensor, state: Tensor, kept: Tensor) -> Tensor:
    """The last W inputs [B, C, W] after an accepted path.

    Args:
        x: inputs of the nodes, [B, C, n].
        state: the W inputs before the root.
        kept: the result of `kept_inputs` for W.
    """
    return torch.cat([state, x.to(state.dtype)], 2).gather(2, kept[:, None].expand(-1, x.shape[1], -1))
