"""Kernels of relaxed rules: the mass of the nearest codes of x, and the tokens around x in the order of p."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import DOUBLE, FLOATS, INDEX, REAL, at_home, sizes

_BLOCK = 4096


@triton.jit
def _lantern(
    X, LOG_Z, NODES, TOKENS, Q, NEAR, CHANCE, K, k, x_b, x_n, nodes_b, tokens_b, q_b, near_v, log_b,
    BOUND: tl.constexpr, RELATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One drafted token: its own mass, and the longest prefix of its neighbours' masses within the bound."""
    b, i = (tl.program_id(0) // K).to(tl.int64), (tl.program_id(0) % K).to(tl.int64)
    node, x = tl.load(NODES + b * nodes_b + i), tl.load(TOKENS + b * tokens_b + i)
    there, x = x >= 0, tl.maximum(x, 0)
    line, log_z = X + b * x_b + node * x_n, tl.load(LOG_Z + b * log_b + node)
    p_x = tl.exp((tl.load(line + x).to(tl.float32) - log_z).to(tl.float64))
    p_x = tl.where(there, p_x, 0.0)
    j = tl.arange(0, BLOCK)
    near = tl.load(NEAR + x * near_v + j, mask=j < k, other=0).to(tl.int64)
    mass = tl.load(line + near, mask=j < k, other=-float("inf")).to(tl.float32) - log_z
    sums = tl.cumsum(tl.exp(mass.to(tl.float64)), 0)
    limit = tl.full([], BOUND, tl.float64)
    if RELATIVE:
        limit = (limit - 1.0) * p_x
    more = tl.max(tl.where((sums <= limit) & (j < k), sums, 0.0), 0)
    q_x = tl.load(Q + b * q_b + i)
    tl.store(CHANCE + b * K + i, tl.where(p_x > 0, tl.minimum((p_x + more) / q_x, 1.0), 0.0))


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
    """See `reference.lantern_accept`; [B, K, k] masses are never written to memory."""
    dim = sizes(
        "lantern_accept",
        logits=(logits, "B N V", FLOATS),
        log_z=(log_z, "B N", REAL),
        nodes=(nodes, "B K", INDEX),
        x=(x, "B K", INDEX),
        q_x=(q_x, "B K", DOUBLE),
        near=(near, "V k", (torch.int32,)),
    )
    if (delta is None) == (lam is None):
        raise ValueError(f"lantern_accept takes delta or lam, exactly one of them; got delta={delta!r}, lam={lam!r}")
    bound = delta if lam is None else lam
    assert bound is not None
    chance = torch.empty(dim["B"], dim["K"], dtype=torch.float64, device=logits.device)
    if chance.numel():
        with at_home(logits):
            _lantern[(chance.numel(),)](
                logits, log_z, nodes, x, q_x, near, chance, dim["K"], dim["k"],
                *logits.stride()[:2], nodes.stride(0), x.stride(0), q_x.stride(0), near.stride(0), log_z.stride(0),
                BOUND=float(bound), RELATIVE=lam is not None,  # a literal keeps all its bits
                BLOCK=triton.next_power_of_2(dim["k"]),
            )  # fmt: skip
    return chance


@triton.jit
def _ordered(x):
    """float32 as uint32 in the same order; −0 like 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _sides(X, start, x, own, V, BLOCK: tl.constexpr):
    """Tokens of a block, their keys in the order by (logit, id), and which are below and above x in that order."""
    v = start + tl.arange(0, BLOCK)
    value = tl.load(X + v, mask=v < V, other=-float("inf")).to(tl.float32)
    value = tl.where(own > -float("inf"), value, -float("inf"))
    real, key, key_x = value > -float("inf"), _ordered(value), _ordered(own)
    below = real & ((key < key_x) | ((key == key_x) & (v < x)))
    above = real & ((key > key_x) | ((key == key_x) & (v > x)))
    return v, key, below, above


@triton.jit
def _ends(X, x, own, V, less, more, BLOCK: tl.constexpr):
    """Keys at both ends of the window, 8 bits in each of four passes, and how many equal keys to skip or take."""
    bins = tl.arange(0, 256)
    low, high = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)  # known bits of the ends
    want_low, want_high = tl.zeros([], tl.int32) + less, tl.zeros([], tl.int32) + more  # remaining number
    ties = tl.full([], 0, tl.int32)
    for step in range(0, 4):
        shift = 24 - 8 * step
        low_hist, high_hist = tl.zeros([256], tl.int32), tl.zeros([256], tl.int32)
        for start in range(0, V, BLOCK):
            _, key, below, above = _sides(X, start, x, own, V, BLOCK)
            digit = ((key >> shift) & 255).to(tl.int32)
            head = (key.to(tl.uint64) >> (shift + 8)).to(tl.uint32)
            low_hist += tl.histogram(digit, 256, mask=below & (head == low))
            high_hist += tl.histogram(digit, 256, mask=above & (head == high))
        # below: from the largest digit down; above: from the smallest up
        down, up = tl.cumsum(low_hist, 0, reverse=True), tl.cumsum(high_hist, 0)
        low_digit = tl.maximum(tl.sum((down >= want_low).to(tl.int32), 0) - 1, 0)
        high_digit = tl.minimum(tl.sum((up < want_high).to(tl.int32), 0), 255)
        want_low -= tl.sum(tl.where(bins > low_digit, low_hist, 0), 0)
        want_high -= tl.sum(tl.where(bins < high_digit, high_hist, 0), 0)
        low = (low << 8) | low_digit.to(tl.uint32)
        high = (high << 8) | high_digit.to(tl.uint32)
        ties = tl.sum(tl.where(bins == low_digit, low_hist, 0), 0)
    return low, tl.maximum(ties - want_low, 0), high, want_high


@triton.jit
def _window(
    X, NODES, TOKENS, IDS, FOUND, K, V, less, more, x_b, x_n, nodes_b, tokens_b,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One drafted token: the `less` tokens directly below it and the `more` above; nearest ids among equal ones."""
    b, i = (tl.program_id(0) // K).to(tl.int64), (tl.program_id(0) % K).to(tl.int64)
    node, x = tl.load(NODES + b * nodes_b + i), tl.maximum(tl.load(TOKENS + b * tokens_b + i), 0).to(tl.int32)
    X += b * x_b + node * x_n
    own = tl.load(X + x).to(tl.float32)
    low, skip, high, take = _ends(X, x, own, V, less, more, BLOCK)
    out = (b * K + i) * (less + more + 1)
    tl.store(IDS + out, x.to(tl.int64))
    tl.store(FOUND + out, (own > -float("inf")).to(tl.int8))
    filled = tl.full([], 1, tl.int32)
    low_ties, high_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v, key, below, above = _sides(X, start, x, own, V, BLOCK)
        low_tie, high_tie = (below & (key == low)).to(tl.int32), (above & (key == high)).to(tl.int32)
        low_rank = low_ties + tl.cumsum(low_tie, 0) - 1
        high_rank = high_ties + tl.cumsum(high_tie, 0) - 1
        chosen = (below & (key > low)) | ((low_tie != 0) & (low_rank >= skip))
        chosen = chosen | (above & (key < high)) | ((high_tie != 0) & (high_rank < take))
        place = filled + tl.cumsum(chosen.to(tl.int32), 0) - 1
        fits = chosen & (place < less + more + 1)
        tl.store(IDS + out + place, v.to(tl.int64), mask=fits)
        tl.store(FOUND + out + place, fits.to(tl.int8), mask=fits)
        filled += tl.sum(chosen.to(tl.int32), 0)
        low_ties += tl.sum(low_tie, 0)
        high_ties += tl.sum(high_tie, 0)


def logit_window(logits: Tensor, nodes: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """See `reference.logit_window`; without sorting. Of equal logits, those with ids nearest to x come first.

    Entries without a token have the id x.
    """
    dim = sizes("logit_window", logits=(logits, "B N V", FLOATS), nodes=(nodes, "B K", INDEX), x=(x, "B K", INDEX))
    V = dim["V"]
    less, more = min(size // 2, V), min(size - size // 2 - 1, V)
    ids = x.clamp(min=0)[..., None].repeat(1, 1, less + more + 1)
    there = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    if ids.numel():
        with at_home(logits):
            _window[(x.numel(),)](
                logits, nodes, x, ids, there.view(torch.uint8), dim["K"], V, less, more,
                *logits.stride()[:2], nodes.stride(0), x.stride(0),
                BLOCK=min(_BLOCK, triton.next_power_of_2(V)), num_warps=8,
            )  # fmt: skip
    return ids, there
