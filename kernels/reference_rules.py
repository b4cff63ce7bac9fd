"""Definitions: the chance to accept a draft token, exact and relaxed, and the residual distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.kernels.reference_noise import widest


def exact_ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Chance to accept x in speculative sampling: min(1, p(x)/q(x)), 0 if p(x) = 0 (Leviathan et al. 2023, §2.3)."""
    return torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), 0.0)


def positive_residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights of (p − q)+, the residual after a rejection; p where it is zero by rounding."""
    rest = (p - q).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def emptied_residual(p: Tensor, q: Tensor, around: Tensor, borrows: Tensor, certain: Tensor) -> Tensor:
    """(p − q)+ after tokens around a rejected x were removed from p, or from q (Jang et al. 2024, as released).

    Args:
        p, q: [..., V].
        around: int64 [..., M], the tokens to remove.
        borrows: bool [...], whether they are removed.
        certain: bool [...], whether x was not drawn at random: they are then removed from p, otherwise from q.

    Returns:
        [..., V]; p where it would be zero.
    """
    gone = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, around, True) & borrows[..., None]
    of_p = gone & certain[..., None]
    rest = (torch.where(of_p, 0.0, p) - torch.where(gone & ~of_p, 0.0, q)).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def typical_bound(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """Least probability of a typical token of the distributions p [..., V]: min(ε, δ·exp(−H(p))) (Cai et al. 2024,
    Medusa)."""
    return (delta * torch.exp(torch.special.entr(p).sum(-1).neg())).clamp(max=epsilon)


def nearest(codebook: Tensor, k: int, chunk: int = 2048) -> Tensor:
    """The k codes nearest to each code, nearest first, itself left out: int32 [V, k] from a codebook [V, c].

    Distances are between normalised codes, since a model with an L2-normalised codebook uses nothing else.
    """
    codes = torch.nn.functional.normalize(codebook.float(), dim=-1)
    parts = []
    for start in range(0, len(codes), chunk):
        likeness = codes[start : start + chunk] @ codes.T
        likeness.diagonal(start).fill_(-torch.inf)
        parts.append(likeness.topk(k, -1).indices.to(torch.int32))
    return torch.cat(parts)


def partition(codebook: Tensor, radius: float | None = None, cells: int | None = None) -> Tensor:
    """Cells of near codes, int64 [V]: farthest-point centres (Gonzalez 1985), each code with its nearest one.

    Centres are added until every code is within `radius` of its centre, or until there are `cells` of them, so with
    `radius` two codes of a cell are at most 2·radius apart. Distances are between normalised codes.
    """
    codes = torch.nn.functional.normalize(codebook.detach().cpu().double(), dim=-1)
    cell, distance = torch.zeros(len(codes), dtype=torch.long, device="cpu"), (codes - codes[0]).norm(dim=-1)
    for centre in range(1, cells if cells is not None else len(codes)):
        if float(distance.max()) <= (radius or 0.0):
            break
        away = (codes - codes[distance.argmax()]).norm(dim=-1)
        cell = torch.where(away < distance, centre, cell)
        distance = torch.minimum(away, distance)
    return cell.to(codebook.device)


def borrowed(masses: Tensor, bound: Tensor | float) -> Tensor:
    """The largest prefix sum within the bound: the mass that x borrows from its neighbours (Jang et al. 2024, §4).

    Args:
        masses: [..., k], p of the neighbours, nearest first.
        bound: a number or [...].

    Returns:
        [...], c(m*) with m* = max{j : c(j) ≤ bound} and c(0) = 0.
    """
    sums = masses.cumsum(-1)
    limit = bound[..., None] if isinstance(bound, Tensor) else bound
    return torch.where(sums <= limit, sums, 0.0).amax(-1)


def rank_window(p: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` tokens around x [...] in the order of p [..., V]: x, ⌊size/2⌋ less likely ones, the rest more likely.

    Returns:
        Token ids [..., size], and bool of the same shape: false where the window extends past an end of the order, and
        for tokens of probability 0, which have no rank.
    """
    x, ids = x[..., None], torch.arange(p.shape[-1], device=p.device)
    p_x = p.gather(-1, x)
    below = (p < p_x) | ((p == p_x) & (ids < x))
    above = ~below & (ids != x)
    less = torch.where(below, p, -torch.inf).topk(min(size // 2, len(ids)), -1)
    more = torch.where(above, -p, -torch.inf).topk(min(size - size // 2 - 1, len(ids)), -1)
    window = torch.cat([less.indices, x, more.indices], -1)
    there = torch.cat([less.values, p_x, more.values], -1) > -torch.inf
    return window, there & (p.gather(-1, window) > 0)


def cell_sums(weights: Tensor, cell: Tensor) -> Tensor:
    """The mass of each token's whole cell, [..., V], from weights [..., V] and the partition [V]."""
    index = cell.to(weights.device).expand_as(weights)
    return torch.zeros_like(weights).scatter_add_(-1, index, weights).gather(-1, index)


def cell_residual(p: Tensor, q: Tensor, cell: Tensor) -> Tensor:
    """Weights after a rejection at cell level: a cell by (p(C) − q(C))+, then its token by p; p if all are zero.

    q counts only where p > 0, so that cells are restricted to tokens that p can draw.
    """
    p_cell, q_cell = cell_sums(p, cell), cell_sums(torch.where(p > 0, q, 0.0), cell)
    rest = torch.where(p > 0, p * (p_cell - q_cell).clamp(min=0) / p_cell, 0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def token_mass(logits: Tensor, log_z: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """Probability, of dtype `widest`, of tokens [B, K] or [B, K, M] after nodes [B, K]; 0 for a negative token."""
    rows = torch.arange(len(nodes), device=nodes.device)[:, None]
    if tokens.dim() > nodes.dim():
        rows, nodes = rows[..., None], nodes[..., None]
    log_p = logits[rows, nodes, tokens.clamp(min=0)] - log_z[rows, nodes]
    return log_p.to(widest(log_p.device)).exp() * (tokens >= 0)


def lantern_accept(
    logits: Tensor,
    log_z: Tensor,
    nodes: Tensor,
    x: Tensor,
    q_x: Tensor,
    near: Tensor,
    delta: float | None = None,
    lam: float | None = None,
) -> Tensor:
    """The chance [B, K], like q_x, to accept x with the mass that it borrows from its neighbours (`borrowed`).

    Args:
        logits: [B, N, V] of p, with their logsumexp `log_z` [B, N].
        nodes: int64 [B, K], the node after which each x was drafted.
        x: int64 [B, K], negative where nothing was drafted.
        q_x: float64 (float32 on MPS) [B, K], its probability in the draft's distribution.
        near: int32 [V, k], the nearest codes of each, nearest first.
        delta, lam: the bound of the borrowed mass: delta, or (lam − 1)·p(x); exactly one of them.
    """
    p_x = token_mass(logits, log_z, nodes, x)
    masses = token_mass(logits, log_z, nodes, near[x.clamp(min=0)].long())
    bound = delta if lam is None else (lam - 1) * p_x
    assert bound is not None
    more = borrowed(masses, bound)
    return torch.where(p_x > 0, exact_ratio(p_x + more, q_x), 0.0)


def logit_window(logits: Tensor, nodes: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`rank_window` of x [B, K] in the order of the logits [B, N, V] at nodes [B, K]; the ids come in any order."""
    rows = torch.arange(len(nodes), device=nodes.device)[:, None]
    return rank_window(logits[rows, nodes].to(widest(logits.device)).softmax(-1), x.clamp(min=0), size)


def gaussian_path(
    states: Tensor,
    noise: Tensor,
    log_std_q: Tensor,
    out: Tensor,
    table: Tensor,
    out_null: Tensor | None = None,
    guidance: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """log P/Q of whole denoising paths: log-densities of the draft's own steps under the target's kernels, summed.

    Step k goes from states[:, k] to states[:, k + 1]; the draft drew it with `noise` and standard deviation
    temperature·exp(log_std_q). The target's kernel there has DDPM's mean and learned-range variance from the network's
    output ε and v; ε is guided if there are two outputs, v is always that of `out`.

    Args:
        states: [R, K + 1, C], the path that the draft took, noise first.
        noise: [R, K, C], standard normal numbers.
        log_std_q: [R, K, C].
        out: [R, K, 2·C], the target's network at states[:, :-1]: ε, then v.
        table: float32 [K, 6]: √ᾱ, √(1 − ᾱ), the weights of x̂₀ and x in the mean, log β and log β̃ of each step.
        out_null: [R, K, ≥ C], the same without the condition; ε = ε₀ + guidance·(ε − ε₀).
        guidance: float32 [R].
        temperature: scales the noise of both kernels.

    Returns:
        float32 [R], summed in float32.
    """
    C = states.shape[2]
    x, after, eps = states[:, :-1].float(), states[:, 1:].float(), out[..., :C].float()
    if out_null is not None and guidance is not None:
        null = out_null[..., :C].float()
        eps = null + guidance.float()[:, None, None] * (eps - null)
    root, rest, to_clean, to_x, log_beta, log_tilde = (t[:, None] for t in table.float().unbind(1))
    mean = to_clean * (x - rest * eps) / root + to_x * x
    share = (out[..., C : 2 * C].float() + 1) / 2
    log_std = (share * log_beta + (1 - share) * log_tilde) / 2
    z = (after - mean) * torch.exp(-log_std) / temperature
    return (0.5 * (noise.float() ** 2 - z**2) + log_std_q.float() - log_std).sum((1, 2))
