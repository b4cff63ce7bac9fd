"""Counter-based noise inside kernels: the same SplitMix64 numbers as `reference.uniform` and `reference.gumbel`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels import reference
from mmspec.kernels.checks import at_home

GUMBEL = tl.constexpr(reference.GUMBEL)


@triton.jit
def hashed(seed, counter):
    """`reference_noise._hash` as uint64: unsigned, so that a right shift is logical."""
    x = seed.to(tl.uint64) + (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def unit(bits):
    """The upper 53 bits as a float64 in [0, 1)."""
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def gumbel_cell(seed, position):
    """The seed of one position's Gumbel noise; its counter v is for token v."""
    return hashed(hashed(seed, tl.full([], -1 - GUMBEL, tl.int64)), position)


@triton.jit
def gumbel(cell, token):
    u = tl.maximum(unit(hashed(cell, token)), 1.0 / 18014398509481984.0)
    return -tl.log(-tl.log(u))


@triton.jit
def _uniform(SEED, COUNTER, OUT, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    seed = tl.load(SEED + at, mask=inside, other=0)
    counter = tl.load(COUNTER + at, mask=inside, other=0)
    tl.store(OUT + at, unit(hashed(seed, counter)), mask=inside)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """See `reference.uniform`; bit for bit the same."""
    for name, tensor in (("seed", seed), ("counter", counter)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"uniform: {name} is {tensor.dtype}; allowed: int64")
    if seed.device != counter.device:
        raise ValueError(f"uniform: counter is on {counter.device}, seed on {seed.device}; move them to one device")
    seed, counter = (t.contiguous() for t in torch.broadcast_tensors(seed, counter))
    out = torch.empty(seed.shape, dtype=torch.float64, device=seed.device)
    if out.numel():
        with at_home(out):
            _uniform[(triton.cdiv(out.numel(), 256),)](seed, counter, out, out.numel(), BLOCK=256)
    return out
