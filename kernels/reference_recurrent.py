"""Definitions for layers that keep a recurrent state: every node of a draft's tree read at once, one node committed.

A layer's state is a matrix S [K, V]; a node decays it by e^g, writes k⊗u into it and reads q from what it then holds.
On a tree node i sees the writes of its ancestors j alone, each decayed by e^(G_i − G_j), where G is the decay summed
along the node's path. So one triangular matrix stands for the tree, no state is kept per node, and the state after any
node is a weighted sum of what was written on the way to it. For a chain this is the chunked form of the gated delta
rule (Yang et al. 2024, arXiv 2412.06464, §3.3) and of state space duality (Dao and Gu 2024, arXiv 2405.21060, §6).
"""

from __future__ import annotations

import torch
from torch import Tensor


def path_decay(g: Tensor, ancestors: Tensor) -> Tensor:
    """G [B, H, n, …], the decay summed from the root to each node.

    Args:
        g: log decay of each node, [B, H, n], or [B, H, n, K] where every channel of the keys has its own.
        ancestors: bool [B, n, n], a node counts among its own.
    """
    return torch.einsum("bij,bhj...->bhi...", ancestors.to(g.dtype), g)


def decayed_products(a: Tensor, b: Tensor, G: Tensor, ancestors: Tensor) -> Tensor:
    """Σ_d a_id · b_jd · e^(G_i − G_j), [B, H, n, n], zero where j is no ancestor of i.

    Args:
        a, b: [B, H, n, K].
        G: [B, H, n], or [B, H, n, K].
    """
    shape = ancestors[:, None] if G.dim() == 3 else ancestors[:, None, :, :, None]
    decay = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(~shape, -torch.inf).exp()
    if G.dim() == 3:
        return (a @ b.transpose(-1, -2)) * decay
    return torch.einsum("bhik,bhjk,bhijk->bhij", a, b, decay)


def _faded(x: Tensor, G: Tensor) -> Tensor:
    """x [B, H, n, K] times e^G."""
    return x * (G if G.dim() == 4 else G[..., None]).exp()


def delta_writes(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, state: Tensor, ancestors: Tensor) -> Tensor:
    """What each node writes under the delta rule: u_i = β_i (v_i − what the state before it answers to k_i).

    Args:
        k, v: [B, H, n, K], [B, H, n, V].
        beta: [B, H, n].
        G: as `path_decay` gives it.
        state: [B, H, K, V], before the root.
        ancestors: bool [B, n, n]; a parent stands before its children.

    Returns:
        u [B, H, n, V].
    """
    n = k.shape[2]
    others = ancestors & ~torch.eye(n, dtype=torch.bool, device=k.device)
    system = decayed_products(k, k, G, others) * beta[..., None]
    wanted = (v - _faded(k, G) @ state) * beta[..., None]
    solved: Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return solved


def recurrent_read(q: Tensor, k: Tensor, u: Tensor, G: Tensor, state: Tensor, ancestors: Tensor) -> Tensor:
    """What each node reads, [B, H, n, V]: from the state before the root, and from what its ancestors and it wrote.

    Args:
        q, k: [B, H, n, K].
        u: [B, H, n, V].
        G: as `path_decay` gives it.
        state: [B, H, K, V], before the root.
        ancestors: bool [B, n, n].
    """
    return _faded(q, G) @ state + decayed_products(q, k, G, ancestors) @ u


def recurrent_fold(k: Tensor, u: Tensor, G: Tensor, state: Tensor, kept: Tensor, count: Tensor) -> Tensor:
    """The state [B, H, K, V] once a path has been taken: what its nodes wrote, faded until its end.

    Args:
        k, u: what the nodes wrote, [B, H, n, K] and [B, H, n, V].
        G: as `path_decay` gives it.
        state: [B, H, K, V], before the root.
        kept: [B, m], the path's nodes in order; entries from `count` on mean nothing.
        count: int64 [B]; where it is 0, the state stays.
    """
    rows, place = torch.arange(len(kept), device=kept.device)[:, None], torch.arange(kept.shape[1], device=kept.device)
    k, u, G = (t.transpose(1, 2)[rows, kept].transpose(1, 2) for t in (k, u, G))  # of the path alone
    end = G.transpose(1, 2)[rows, count[:, None].clamp(min=1) - 1].transpose(1, 2)  # [B, H, 1, …]
    end = end.masked_fill((count == 0).view(-1, *[1] * (G.dim() - 1)), 0.0)
    there = (place < count[:, None])[:, None]
    weight = (end - G).masked_fill(~(there if G.dim() == 3 else there[..., None]), -torch.inf).exp()
    faded = end[..., None] if G.dim() == 3 else end.transpose(2, 3)
    return state * faded.exp() + (k * (weight if G.dim() == 4 else weight[..., None])).transpose(-1, -2) @ u


def conv_windows(parents: Tensor, depth: Tensor, width: int) -> Tensor:
    """Where the last `width` inputs of each node stand, oldest first, int64 [B, n, width]: an index into the `width`
    inputs before the root, followed by those of the n nodes.

    Args:
        parents, depth: [B, n], of the tree.
    """
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    found = []
    for back in range(width):
        found.append(torch.where(depth >= back, width + node, width - (back - depth)))
        node = parents.gather(1, node)
    return torch.stack(found[::-1], -1)


def tree_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor) -> Tensor:
    """A causal depthwise convolution over every path of a tree, [B, C, n].

    Args:
        x: inputs of the nodes, [B, C, n].
        state: the last W ≥ k inputs before the root, [B, C, W].
        weight: [C, k].
        bias: [C], or None.
        windows: as `conv_windows` gives it for W.
    """
    (B, C, n), k = x.shape, weight.shape[-1]
    columns = torch.cat([state.to(x.dtype), x], 2)
    index = windows[..., -k:].reshape(B, 1, n * k).expand(B, C, n * k)
    out = (columns.gather(2, index).view(B, C, n, k).to(weight.dtype) * weight[:, None]).sum(-1)
    return out if bias is None else out + bias[:, None]


def conv_fold(x: Tensor, state: Tensor, kept: Tensor, count: Tensor) -> Tensor:
    """The last W inputs [B, C, W] once a path has been taken.

    Args:
        x: inputs of the nodes, [B, C, n].
        state: the W inputs before the root.
        kept: [B, m], the path's nodes in order; entries from `count` on mean nothing.
        count: int64 [B].
    """
    W = state.shape[2]
    place = count[:, None] + torch.arange(-W, 0, device=x.device)  # on the path; below 0 before the root
    node = kept.gather(1, place.clamp(min=0))
    index = torch.where(place >= 0, W + node, W + place)
    return torch.cat([state, x.to(state.dtype)], 2).gather(2, index[:, None].expand(-1, x.shape[1], -1))
