"""Definitions for draft trees: attention, verification at all nodes at once, and moving of accepted cache entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.kernels.reference_noise import NOTHING, Noise, categorical, gumbel, remaining, widest
from mmspec.kernels.reference_rules import positive_residual, token_mass


def compact_rows(buffers: Sequence[Tensor], source: Tensor, start: Tensor) -> None:
    """Move kept cache entries down, in place: slot start + j of a row gets the content of slot source[:, j].

    Args:
        buffers: each [B, heads, slots, width], changed in place.
        source: int64 [B, K], slots to keep, in any order.
        start: int64 [B], the first slot to write in each row.
    """
    rows = torch.arange(len(source), device=source.device)[:, None]
    target = start[:, None] + torch.arange(source.shape[1], device=source.device)
    for buffer in buffers:
        buffer[rows, :, target] = buffer[rows, :, source]  # [B, K, heads, width]


def bit_rows(visible: Tensor) -> Tensor:
    """Pack bool [..., N] into words of 64 bits, int64 [..., ⌈N/64⌉]: bit k of word w is entry 64·w + k."""
    words = -(-visible.shape[-1] // 64)
    spread = torch.nn.functional.pad(visible, (0, 64 * words - visible.shape[-1])).unflatten(-1, (words, 64))
    packed: Tensor = (spread.long() << torch.arange(64, device=visible.device)).sum(-1)
    return packed


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    bits: Tensor,
    open_slots: Tensor | None = None,
    first: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of draft nodes to [their row's cached prefix | the nodes that they may see].

    Row b has its prefix in slots 0 … lengths[b] − 1, and node k in slot lengths[b] + k. Slots that no query of the row
    sees may contain anything, even NaN. A query that sees nothing gives 0.

    Args:
        q: [B, heads, n, D].
        keys: [B, kv_heads, T, D]; query head h reads kv head h // (heads / kv_heads).
        values: [B, kv_heads, T, E].
        lengths: int64 [B].
        bits: int64 [B, n, W], which nodes each query sees (see `bit_rows`).
        open_slots: bool [B, L], false at prefix slots that hold padding; no slot past L is padding.
        first: int64 [B, n], the first prefix slot that a query sees, for sliding windows; None: 0.
        scale: of the scores; None: 1/√D.

    Returns:
        [B, heads, n, E], in q's dtype; the arithmetic is float32.
    """
    B, heads, n, D = q.shape
    groups, T = keys.shape[1], keys.shape[2]
    slot = torch.arange(T, device=q.device)
    node = slot - lengths[:, None]  # [B, T], negative in the prefix
    word = (node.clamp(min=0) // 64).clamp(max=bits.shape[2] - 1)[:, None].expand(B, n, T)
    tree = ((bits.gather(2, word) >> (node & 63)[:, None]) & 1).bool() & (node < 64 * bits.shape[2])[:, None]
    past = (node < 0)[:, None].expand(B, n, T)
    if open_slots is not None:
        past = past & torch.nn.functional.pad(open_slots, (0, max(0, T - open_slots.shape[1])), value=True)[:, None, :T]
    if first is not None:
        past = past & (slot >= first[:, :, None])
    visible = torch.where((node < 0)[:, None], past, tree)  # [B, n, T]
    used = visible.any(1)[:, None, :, None]
    k, v = (torch.where(used, t, 0.0).float() for t in (keys, values))
    scores = q.float().unflatten(1, (groups, -1)).flatten(2, 3) @ k.mT * (D**-0.5 if scale is None else scale)
    hidden = ~visible[:, None, None].expand(B, groups, heads // groups, n, T).flatten(2, 3)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    out: Tensor = (weights @ v).unflatten(2, (heads // groups, n)).flatten(1, 2).to(q.dtype)
    return out


class Verified(NamedTuple):
    """The accepted path of a point-mass draft, and the token after it."""

    accepted: Tensor  # [B, N] bool
    count: Tensor  # type: ignore[assignment]  # [B], accepted nodes; hides tuple.count
    last: Tensor  # [B], the deepest of them
    token: Tensor  # [B], the next token


def draw(logits: Tensor, noise: Noise) -> Tensor:
    """A sample for each node, int64 [B, N], by the Gumbel noise of (seed [B], position [B, N]).

    It is NOTHING where the logits hold NaN or +inf, or all are −inf.
    """
    return noisiest(logits, gumbel(*noise, logits.shape[-1]))


def likeliest(logits: Tensor) -> Tensor:
    """argmax over the last axis, the first of equal ones; on a CPU torch's `max` is faster than `argmax`."""
    return logits.max(-1).indices


def noisiest(logits: Tensor, noise: Tensor) -> Tensor:
    """`draw` with given Gumbel noise, finite [B, N, V]."""
    best, drawn = (logits + noise).max(-1)
    return torch.where(best.isfinite(), drawn, NOTHING)


def verify_point_mass(logits: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor | None, u: Tensor) -> Verified:
    """Draw a token after every node and descend while a child has it; path and next token have the distribution p.

    Args:
        logits: [B, N, V], log-weights of p after each node.
        tokens: int64 [B, N], negative if nothing is proposed; of siblings with the same token only the first can be
            accepted.
        parents: int64 [B, N], parents before their children; the root is its own parent.
        ancestors: bool [B, N, N], a node is its own ancestor; None: the draft is a chain.
        u: uniform numbers [B, N], float64 (float32 on MPS), for an inverse CDF in the order "children first, then the
            vocabulary".
    """
    log_z = logits.float().logsumexp(-1)
    siblings, repeated = _family(tokens, parents)
    mass = token_mass(logits, log_z, parents, tokens) * ~repeated
    low, here = sibling_mass(mass, siblings), u.gather(1, parents)
    match = (low <= here) & (here < low + mass)
    if ancestors is not None:  # if slices of siblings overlap by rounding, the first is accepted
        match &= ~(siblings & match[:, None]).any(-1)
    accepted, count, last = standing(match, ancestors)
    refused = torch.where(parents == last[:, None], tokens, -1)
    refused[:, 0] = -1
    taken = torch.where(refused >= 0, mass, 0.0).sum(-1)
    rest = remaining(u.gather(1, last[:, None])[:, 0], taken)
    token = residual_sample(logits[torch.arange(len(last), device=last.device), last], rest, refused=refused)
    return Verified(accepted, count, last, token)


def follow(
    drawn: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Descend from the root while a child has the token drawn at its parent [B, N]; see `verify_point_mass`. Returns
    the mask of accepted nodes, their number, the deepest of them, and the token drawn there."""
    if tokens.shape[1] == 1:  # plain decoding: only the root, which is accepted
        one = torch.ones_like(drawn[:, 0])
        return one[:, None].bool(), one, one - 1, drawn[:, 0]
    match = drawn.gather(1, parents) == tokens
    if ancestors is not None:
        match &= ~_family(tokens, parents)[1]
    accepted, count, last = standing(match, ancestors)
    return accepted, count, last, drawn.gather(1, last[:, None])[:, 0]


def standing(match: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes that matched with all their ancestors (a path; the root always matches), their number, and the deepest."""
    match[:, 0] = True
    accepted = match.cumprod(1).bool() if ancestors is None else (match[:, None, :] | ~ancestors).all(-1)
    count = accepted.sum(-1)
    if ancestors is None:
        return accepted, count, count - 1
    return accepted, count, (accepted * torch.arange(match.shape[1], device=match.device)).amax(-1)


def _family(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Earlier siblings of each node, bool [B, N, N]; and whether it repeats the token of one of them, bool [B, N]."""
    siblings = (parents[:, :, None] == parents[:, None, :]).tril(-1)
    siblings[:, :, 0] = False  # the root is no sibling
    return siblings, (siblings & (tokens[:, :, None] == tokens[:, None, :])).any(-1)


def sibling_mass(mass: Tensor, siblings: Tensor) -> Tensor:
    """For each node, the mass of its earlier siblings: the lower end of its slice of [0, 1) at its parent.

    Args:
        mass: [B, N], the probability of each node's token at its parent.
        siblings: bool [B, N, N], entry (n, k) is true if k is an earlier sibling of n.

    Returns:
        [B, N].
    """
    return torch.where(siblings, mass[:, None, :], 0.0).sum(-1)  # a product would let a NaN through


def residual_sample(
    p: Tensor,
    u: Tensor,
    q: Tensor | None = None,
    refused: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """A draw from the residual of p after rejections: (p − q)+, or p without the rejected tokens; p if that is zero.

    Args:
        p: logits [B, V].
        u: float64 (float32 on MPS) [B] in [0, 1).
        q: logits [B, V] of the distribution that the rejected draft was drawn from.
        refused: int64 [B, K], the rejected tokens, negative for none; instead of q.
        rows: bool [B], false if nothing was rejected and the draw is from p; None: all true.

    Returns:
        int64 [B], by inverse CDF in float64 (float32 on MPS); NOTHING if p holds NaN or +inf, or only −inf.
    """
    wide = widest(p.device)
    weights = p.to(wide).softmax(-1)
    left = weights
    if refused is not None:
        gone = torch.zeros_like(weights).scatter_add_(1, refused.clamp(min=0), (refused >= 0).to(weights.dtype))
        left = torch.where(gone > 0, 0.0, weights)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, weights)
    elif q is not None:
        left = positive_residual(weights, q.to(wide).softmax(-1))
    if rows is not None:
        left = torch.where(rows[:, None], left, weights)
    return categorical(left, u)
