"""The definitions: every piece of arithmetic that decides what is kept or drawn, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed 64-bit integer."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


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
    x = seed + (counter + 1) * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    x = x ^ _shift(x, 31)
    return _shift(x, 11).to(torch.float64) * 2.0**-53


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


def exact_ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Chance to keep x under rejection sampling: min(1, p(x)/q(x)), 0 where p(x) = 0 (Leviathan et al. 2023, §2.3)."""
    return torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), torch.zeros_like(p_x))


def positive_residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights of (p − q)+, the law once a draft was refused; falls back to p where rounding leaves nothing."""
    rest = (p - q).clamp(min=0)
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
