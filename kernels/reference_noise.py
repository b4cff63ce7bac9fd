"""Definitions: counter-based noise, and draws with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
# A row's streams of noise. Each draft token must be independent of the uniform numbers that test it.
COINS, GUMBEL, FRESH, COUPLE = range(4)  # tests of drafts; seed-exact draws; new drafts; redrawn guesses
NOTHING = -1  # the token drawn from an invalid distribution: its logits hold NaN or +inf, or all are −inf
Noise = tuple[Tensor, Tensor]  # seed and counter (or position), both int64


def widest(device: torch.device) -> torch.dtype:
    """The dtype for acceptance and draws: float64, or float32 on devices without it (MPS)."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed 64-bit integer."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(seed: Tensor, counter: Tensor) -> Tensor:
    """SplitMix64: the counter-th number, int64, of the generator with this seed."""
    traced = torch.compiler.is_compiling() or get_proxy_mode() is not None
    return _uncompiled(seed, counter) if traced else _mixed(seed, counter)


@torch.library.custom_op("mmspec::splitmix", mutates_args=())
def _uncompiled(seed: Tensor, counter: Tensor) -> Tensor:
    """`_hash` as an opaque operation for compilers.

    Its products wrap around at 64 bits. torch's C++ back end writes products of a loop index as signed arithmetic,
    whose overflow is undefined in C++: with 32 tokens or more, g++ compiles the loop as endless.
    """
    return _mixed(seed, counter)


@_uncompiled.register_fake
def _(seed: Tensor, counter: Tensor) -> Tensor:
    return seed.new_empty(torch.broadcast_shapes(seed.shape, counter.shape))


def _mixed(seed: Tensor, counter: Tensor) -> Tensor:
    x = seed + (counter + 1) * _GOLDEN
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Counter-based noise: the SplitMix64 hash of (seed, counter) as a number in [0, 1).

    The same pair gives the same number on every device and in every batch, so a row's noise depends only on its own
    seed and position.

    Args:
        seed: int64, any shape that broadcasts with `counter`.
        counter: int64.

    Returns:
        float64 of the broadcast shape, with 53 random bits; on MPS float32, the upper 24 of them.
    """
    dtype = widest(counter.device)
    bits = 53 if dtype == torch.float64 else 24
    return _shift(_hash(seed, counter), 64 - bits).to(dtype) * 2.0**-bits


def stream(seed: Tensor, tag: int) -> Tensor:
    """The seed of one of a row's independent streams of noise: COINS (the seed itself), GUMBEL, FRESH or COUPLE."""
    return seed if tag == COINS else _hash(seed, torch.full_like(seed, -1 - tag))


def gumbel(seed: Tensor, position: Tensor, tokens: int | Tensor) -> Tensor:
    """Gumbel noise of tokens at absolute positions, from the row's GUMBEL stream; finite.

    argmax(log p + gumbel) is a draw from p, which does not depend on the rest of the batch.

    Args:
        seed: int64 [B].
        position: int64 [B, N].
        tokens: their ids, int64 [V]; a number V is all ids below it.

    Returns:
        float64 [B, N, V] (float32 on MPS).
    """
    cell = _hash(stream(seed, GUMBEL)[:, None], position)[..., None]
    counter = tokens if isinstance(tokens, Tensor) else torch.arange(tokens, device=position.device)
    dtype = widest(position.device)
    if dtype == torch.float64:
        return uniform(cell, counter).clamp_(min=2.0**-54).log_().neg_().log_().neg_()
    rest = (2**53 - _shift(_hash(cell, counter), 11)).to(dtype) * 2.0**-53  # 1 − u: precise for large noise
    return rest.clamp_(max=below_one(dtype)).neg_().log1p_().neg_().log_().neg_()


def quantile(u: Tensor) -> Tensor:
    """The standard normal quantiles, float32, at u of `uniform`; finite."""
    if u.dtype == torch.float64:
        exact: Tensor = torch.special.ndtri(u.clamp(min=2.0**-54))
        return exact.float()
    return torch.erfinv(2 * u - 1 + 2.0**-24) * 2**0.5  # at the middles of the 2²⁴ cells; MPS has no ndtri


def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: the first index whose cumulated weight exceeds u times the total.

    Args:
        weights: [..., V], non-negative, not all zero; need not sum to one.
        u: [...], in [0, 1).

    Returns:
        int64 [...]; an index of weight zero is never drawn. NOTHING where the total is 0 or not finite.
    """
    cumulated = weights.to(widest(weights.device)).cumsum(-1)
    threshold = (u * cumulated[..., -1])[..., None]
    index = torch.searchsorted(cumulated, threshold, right=True)[..., 0]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    total = cumulated[..., -1]
    index = torch.minimum(index, last)  # by rounding, u * total may equal the total
    return torch.where((total > 0) & total.isfinite(), index, NOTHING)


def remaining(u: Tensor, taken: Tensor) -> Tensor:
    """A uniform number u ≥ taken, rescaled to [0, 1): after a rejection it is uniform again, for the next draw."""
    return ((u - taken) / (1 - taken)).clamp(0, below_one(u.dtype))


def below_one(dtype: torch.dtype) -> float:
    """The largest number below 1."""
    return 1 - torch.finfo(dtype).eps / 2
