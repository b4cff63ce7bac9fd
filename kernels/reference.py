"""The definitions: every piece of arithmetic that decides what is kept or drawn, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_BELOW_ONE = 1 - 2.0**-53
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

# A row's streams of noise. Each draft token must be independent of the coins that will test it.
COINS, GUMBEL, FRESH, COUPLE = range(4)  # tests of drafts; seed-exact draws; new drafts; drafts carried over


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed 64-bit integer."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(seed: Tensor, counter: Tensor) -> Tensor:
    """SplitMix64: the counter-th number, int64, of the generator that starts at `seed`."""
    x = seed + (counter + 1) * _GOLDEN
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Counter-based noise: the SplitMix64 hash of (seed, counter) as a number in [0, 1).

    The same pair gives the same number on every device and in every batch, so a row's noise depends on nothing but
    its own seed and its own position.

    Args:
        seed: int64, any shape that broadcasts with `counter`.
        counter: int64.

    Returns:
        float64 of the broadcast shape, with 53 random bits.
    """
    return _shift(_hash(seed, counter), 11).to(torch.float64) * 2.0**-53


def stream(seed: Tensor, tag: int) -> Tensor:
    """The seed of one of a row's independent streams of noise: COINS (the seed itself), GUMBEL, FRESH or COUPLE."""
    return seed if tag == COINS else _hash(seed, torch.full_like(seed, -1 - tag))


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise of every token at absolute positions, from the row's GUMBEL stream; finite.

    argmax(log p + gumbel) is a draw from p, and the same draw whatever else is computed beside it.

    Args:
        seed: int64 [B].
        position: int64 [B, N].
        vocab: V.

    Returns:
        float64 [B, N, V].
    """
    cell = _hash(stream(seed, GUMBEL)[:, None], position)[..., None]
    u = uniform(cell, torch.arange(vocab, device=position.device)).clamp_(min=2.0**-54)
    return u.log_().neg_().log_().neg_()


def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: the first index whose cumulated weight exceeds u times the total.

    Args:
        weights: [..., V], non-negative, not all zero; need not sum to one.
        u: [...], in [0, 1).

    Returns:
        int64 [...]; an index of weight zero is never drawn.
    """
    cumulated = weights.to(torch.float64).cumsum(-1)
    threshold = (u * cumulated[..., -1])[..., None]
    index = torch.searchsorted(cumulated, threshold, right=True)[..., 0]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)  # rounding may carry u * total up to the total itself


def remaining(u: Tensor, taken: Tensor) -> Tensor:
    """A uniform number u ≥ taken, stretched to [0, 1) again: it is as good as new for the draw after a refusal."""
    return ((u - taken) / (1 - taken)).clamp(0, _BELOW_ONE)


def exact_ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Chance to keep x under rejection sampling: min(1, p(x)/q(x)), 0 where p(x) = 0 (Leviathan et al. 2023, §2.3)."""
    return torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), torch.zeros_like(p_x))


def positive_residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights of (p − q)+, the law once a draft was refused; falls back to p where rounding leaves nothing."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def scaled_ratio(p_x: Tensor, q_x: Tensor, omega: Tensor | float) -> Tensor:
    """min(1, ω·p(x)/q(x)), 0 where p(x) = 0; at least `exact_ratio` for every ω ≥ 1."""
    return torch.where(p_x > 0, (omega * p_x / q_x).clamp(max=1.0), torch.zeros_like(p_x))


def nearest(codebook: Tensor, k: int, chunk: int = 2048) -> Tensor:
    """The k codes nearest to each code, nearest first, itself left out: int32 [V, k] from a codebook [V, c].

    Distances are between normalised codes, which is all that a model with an L2-normalised codebook ever sees.
    """
    codes = torch.nn.functional.normalize(codebook.float(), dim=-1)
    found = []
    for start in range(0, len(codes), chunk):
        likeness = codes[start : start + chunk] @ codes.T
        likeness.diagonal(start).fill_(-torch.inf)
        found.append(likeness.topk(k, -1).indices.to(torch.int32))
    return torch.cat(found)


def partition(codebook: Tensor, radius: float | None = None, cells: int | None = None) -> Tensor:
    """Cells of near codes, int64 [V]: farthest-point centres (Gonzalez 1985), each code with its nearest one.

    Centres are added until every code lies within `radius` of its own, or until there are `cells` of them, so two
    codes of a cell are at most 2·radius apart. Distances are between normalised codes.
    """
    codes = torch.nn.functional.normalize(codebook.double().cpu(), dim=-1)
    cell, distance = torch.zeros(len(codes), dtype=torch.long), (codes - codes[0]).norm(dim=-1)
    for centre in range(1, cells if cells is not None else len(codes)):
        if float(distance.max()) <= (radius or 0.0):
            break
        away = (codes - codes[distance.argmax()]).norm(dim=-1)
        cell = torch.where(away < distance, centre, cell)
        distance = torch.minimum(away, distance)
    return cell.to(codebook.device)


def borrowed(masses: Tensor, bound: Tensor | float) -> Tensor:
    """The largest prefix sum within the bound: what x may borrow of its neighbours (Jang et al. 2024, §4).

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
        Token ids [..., size], and bool of the same shape: false where the window hangs over an end of the order, and
        for tokens that p excludes, which have no order.
    """
    x, ids = x[..., None], torch.arange(p.shape[-1], device=p.device)
    p_x = p.gather(-1, x)
    below = (p < p_x) | ((p == p_x) & (ids < x))
    above = ~below & (ids != x)
    less = torch.where(below, p, -torch.inf).topk(min(size // 2, len(ids)), -1)
    more = torch.where(above, -p, -torch.inf).topk(min(size - size // 2 - 1, len(ids)), -1)
    window = torch.cat([less.indices, x, more.indices], -1)
    found = torch.cat([less.values, p_x, more.values], -1) > -torch.inf
    return window, found & (p.gather(-1, window) > 0)


def cell_sums(weights: Tensor, cell: Tensor) -> Tensor:
    """The mass of each token's whole cell, [..., V], from weights [..., V] and the partition [V]."""
    index = cell.to(weights.device).expand_as(weights)
    return torch.zeros_like(weights).scatter_add_(-1, index, weights).gather(-1, index)


def cell_residual(p: Tensor, q: Tensor, cell: Tensor) -> Tensor:
    """Weights after a refusal at cell level: a cell by (p(C) − q(C))+, then a token of it by p; p if nothing is left.

    q counts only where p does, so that cells are cut down to what p can draw.
    """
    p_cell, q_cell = cell_sums(p, cell), cell_sums(torch.where(p > 0, q, 0.0), cell)
    rest = torch.where(p > 0, p * (p_cell - q_cell).clamp(min=0) / p_cell, 0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def sibling_mass(mass: Tensor, siblings: Tensor) -> Tensor:
    """For each node, the mass of its earlier siblings: the lower end of its slice of [0, 1) at its parent.

    Args:
        mass: [B, N], the probability of each node's token at its parent.
        siblings: bool [B, N, N], entry (n, k) true where k is an earlier sibling of n.

    Returns:
        [B, N].
    """
    return torch.where(siblings, mass[:, None, :], 0.0).sum(-1)  # a product would let a NaN through


def move_rows(buffer: Tensor, source: Tensor, start: Tensor) -> None:
    """Move kept cache entries down, in place: slot start + j of a row takes what stood in slot source[:, j].

    Args:
        buffer: [B, heads, slots, width], changed in place.
        source: int64 [B, K], slots to keep, ascending within a row.
        start: int64 [B], the first slot to write in each row.
    """
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    target = start[:, None] + torch.arange(source.shape[1], device=buffer.device)
    buffer[rows, :, target] = buffer[rows, :, source]
