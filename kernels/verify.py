"""Verification of point-mass drafts in one pass over the logits: each node's draw, its softmax statistics, the path."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import BOOL, DOUBLE, FLOATS, INDEX, at_home, room_for, sizes
from mmspec.kernels.dispatch import TREE_NODES
from mmspec.kernels.noise import gumbel, gumbel_cell
from mmspec.kernels.reference import Noise, Verified
from mmspec.kernels.residual import NOTHING as NO_TOKEN
from mmspec.kernels.residual import pick, scanned

_BLOCK = 4096


@triton.jit(do_not_specialize=["parts"])
def _scan(
    X, SEED, POSITION, M, L, BEST, TOKEN, N, V, chunk, parts, x_b, x_n, position_b,
    DRAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one node's logits: maximum, sum of exponentials, and the token with the highest score if one is
    drawn."""
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, n = line // N, line % N
    X += b * x_b + n * x_n
    m, z = tl.full([], -float("inf"), tl.float32), tl.full([], 0.0, tl.float32)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.zeros([], tl.int32) + NO_TOKEN  # nothing can be drawn if all are −inf
    if DRAW:
        cell = gumbel_cell(tl.load(SEED + b), tl.load(POSITION + b * position_b + n))
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, V), BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < V
        x = tl.load(X + v, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(m, tl.max(x, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        z = z * tl.exp(m - safe) + tl.sum(tl.exp(x - safe), 0)
        m = top
        if DRAW:
            score = tl.where(inside, x.to(tl.float64) + gumbel(cell, v), -float("inf"))
            high = tl.max(score, 0)
            found = tl.min(tl.where((score == high) & inside, v, V), 0)
            token = tl.where(high > best, found, token)
            best = tl.maximum(best, high)
    if DRAW:
        broken = (z != z) | (m == float("inf"))  # one such part decides the whole line
        best = tl.where(broken, float("inf"), best)
        token = tl.where(broken, NO_TOKEN, token)
    at = line * parts + part
    tl.store(M + at, m)
    tl.store(L + at, z)
    if DRAW:
        tl.store(BEST + at, best)
        tl.store(TOKEN + at, token)


@triton.jit
def _log_z(M, L, line, mask, parts, PARTS: tl.constexpr):
    """logsumexp [K] of whole lines [K] from their parts."""
    part = tl.arange(0, PARTS)[None, :]
    inside = mask[:, None] & (part < parts)
    m = tl.load(M + line[:, None] * parts + part, mask=inside, other=-float("inf"))
    z = tl.load(L + line[:, None] * parts + part, mask=inside, other=0.0)
    top = tl.max(m, 1)
    safe = tl.where(top == -float("inf"), 0.0, top)
    return safe + tl.log(tl.sum(z * tl.exp(m - safe[:, None]), 1))


@triton.jit
def _drawn(BEST, TOKEN, line, mask, parts, PARTS: tl.constexpr):
    """The token with the highest score [K] of whole lines; the first of equal ones."""
    part = tl.arange(0, PARTS)[None, :]
    inside = mask[:, None] & (part < parts)
    best = tl.load(BEST + line[:, None] * parts + part, mask=inside, other=-float("inf"))
    token = tl.load(TOKEN + line[:, None] * parts + part, mask=inside, other=2147483647)
    return tl.min(tl.where(best == tl.max(best, 1)[:, None], token, 2147483647), 1).to(tl.int64)


@triton.jit
def _mass(X, M, L, b, parent, token, mask, N, parts, x_b, x_n, PARTS: tl.constexpr):
    """Probability, float64, of tokens [K] after their parents [K]."""
    mask = mask & (token >= 0)
    x = tl.load(X + b * x_b + parent * x_n + token, mask=mask, other=-float("inf")).to(tl.float32)
    log_p = x - _log_z(M, L, b * N + parent, mask, parts, PARTS)
    return tl.where(mask, tl.exp(tl.where(mask, log_p, 0.0).to(tl.float64)), 0.0)


@triton.jit
def _siblings(
    X, TOKENS, PARENTS, M, L, b, k, token, parent, N, parts, x_b, x_n, tokens_b, parents_b,
    NODES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For nodes k [NODES]: whether an earlier sibling has the same token, and the mass of all earlier siblings."""
    repeated = tl.zeros([NODES], tl.int32)
    low = tl.zeros([NODES], tl.float64)
    for start in range(0, N, ROWS):  # a few at a time
        j = start + tl.arange(0, ROWS).to(tl.int64)
        other = tl.load(TOKENS + b * tokens_b + j, mask=j < N, other=-1)
        same = tl.load(PARENTS + b * parents_b + j, mask=j < N, other=-1)
        sibling = (same[:, None] == parent[None, :]) & (j[:, None] < k[None, :]) & (j > 0)[:, None]
        twice = sibling & (other[:, None] == token[None, :])
        repeated = tl.maximum(repeated, tl.max(twice.to(tl.int32), 0))
        # j counts only if no sibling before it has its token
        again = (same[:, None] == parent[None, :]) & (other[:, None] == token[None, :])
        again = tl.max((again & (k[None, :] < j[:, None]) & (k > 0)[None, :]).to(tl.int32), 1)
        mass = _mass(X, M, L, b, tl.maximum(same, 0), other, (j < N) & (again == 0), N, parts, x_b, x_n, PARTS)
        low += tl.sum(tl.where(sibling, mass[:, None], 0.0), 0)
    return repeated, low


@triton.jit(do_not_specialize=["parts"])
def _path(
    X, TOKENS, PARENTS, ANCESTORS, U, M, L, ACCEPTED, COUNT, LAST, REFUSED, REST,
    N, parts, x_b, x_n, tokens_b, parents_b, ancestors_b, ancestors_n, u_b,
    CHAIN: tl.constexpr, NODES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One row's draft: which nodes match, the accepted path, and what the draw after it needs."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, NODES).to(tl.int64)
    inside = k < N
    token = tl.load(TOKENS + b * tokens_b + k, mask=inside, other=-1)
    parent = tl.load(PARENTS + b * parents_b + k, mask=inside, other=0)
    repeated = tl.zeros([NODES], tl.int32)
    low = tl.zeros([NODES], tl.float64)
    if not CHAIN:
        repeated, low = _siblings(
            X, TOKENS, PARENTS, M, L, b, k, token, parent, N, parts, x_b, x_n, tokens_b, parents_b,
            NODES, PARTS, ROWS,
        )  # fmt: skip
    mass = _mass(X, M, L, b, parent, token, inside & (repeated == 0), N, parts, x_b, x_n, PARTS)
    u = tl.load(U + b * u_b + parent, mask=inside, other=0.0)
    match = (low <= u) & (u < low + mass)
    match = (match | (k == 0)) & inside
    if CHAIN:
        accepted = (tl.cumsum(1 - match.to(tl.int32), 0) == 0) & inside
        tl.store(ACCEPTED + b * N + k, accepted.to(tl.int8), mask=inside)
        count = tl.sum(accepted.to(tl.int64), 0)
        last = count - 1
    else:
        count, last = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        for start in range(0, N, ROWS):
            j = start + tl.arange(0, ROWS).to(tl.int64)
            above = ANCESTORS + b * ancestors_b + j[:, None] * ancestors_n + k[None, :]
            above = tl.load(above, mask=(j < N)[:, None] & inside[None, :], other=0) != 0
            accepted = (tl.min((match[None, :] | (above == 0)).to(tl.int32), 1) != 0) & (j < N)
            tl.store(ACCEPTED + b * N + j, accepted.to(tl.int8), mask=j < N)
            count += tl.sum(accepted.to(tl.int64), 0)
            last = tl.maximum(last, tl.max(tl.where(accepted, j, 0), 0))
    tl.store(COUNT + b, count)
    tl.store(LAST + b, last)
    child = (parent == last) & (k > 0) & inside & (token >= 0)
    tl.store(REFUSED + b * N + k, tl.where(child, token, -1), mask=inside)
    taken = tl.sum(tl.where(child, mass, 0.0), 0)
    rest = (tl.load(U + b * u_b + last) - taken) / (1.0 - taken)
    tl.store(REST + b, tl.minimum(tl.maximum(rest, 0.0), 1.0 - 1.0 / 9007199254740992.0))


@triton.jit(do_not_specialize=["parts"])
def _tokens(BEST, TOKEN, OUT, lines, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + line, _drawn(BEST, TOKEN, line, line < lines, parts, PARTS), mask=line < lines)


class _Scanned:
    """The results of `_scan`, [B, N, parts] each; without noise no token is drawn."""

    def __init__(self, logits: Tensor, noise: Noise | None = None) -> None:
        B, N, V = logits.shape
        chunk, self.parts = scanned(logits, B * N, V, _BLOCK)
        shape, device = (B, N, self.parts), logits.device
        self.m, self.z = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        self.best, self.token = self.m, self.m
        if noise is not None:
            self.best = torch.empty(shape, dtype=torch.float64, device=device)
            self.token = torch.empty(shape, dtype=torch.int32, device=device)
        seed, position = (self.m, self.m) if noise is None else noise
        with at_home(logits):
            _scan[(B * N, self.parts)](
                logits, seed, position, self.m, self.z, self.best, self.token, N, V, chunk, self.parts,
                *logits.stride()[:2], position.stride(0), DRAW=noise is not None,
                BLOCK=min(_BLOCK, triton.next_power_of_2(V)), num_warps=8,
            )  # fmt: skip


def draw(logits: Tensor, noise: Noise) -> Tensor:
    """See `reference.draw`; the noise is never written to memory."""
    seed, position = noise
    dim = sizes("draw", logits=(logits, "B N V", FLOATS), seed=(seed, "B", INDEX), position=(position, "B N", INDEX))
    found = _Scanned(logits, noise)
    out = torch.empty(dim["B"], dim["N"], dtype=torch.long, device=logits.device)
    with at_home(logits):
        _tokens[(triton.cdiv(out.numel(), 64),)](
            found.best, found.token, out, out.numel(), found.parts,
            PARTS=room_for(found.parts), BLOCK=64,
        )  # fmt: skip
    return out


def verify_point_mass(logits: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor | None, u: Tensor) -> Verified:
    """See `reference.verify_point_mass`. Four launches.

    The last two read the logits of each row's last node a second time, and one part of them a third.

    Raises:
        ValueError: a tree of more than 256 nodes, which `dispatch` gives to the definition unless Triton is forced (a
            chain may have any length that fits a block).
    """
    dim = sizes(
        "verify_point_mass",
        logits=(logits, "B N V", FLOATS),
        tokens=(tokens, "B N", INDEX),
        parents=(parents, "B N", INDEX),
        ancestors=(ancestors, "B N N", BOOL),
        u=(u, "B N", DOUBLE),
    )
    B, N = dim["B"], dim["N"]
    if ancestors is not None and N > TREE_NODES:
        raise ValueError(
            f"verify_point_mass: a tree has at most {TREE_NODES} nodes by Triton, got {N}; leave MMSPEC_KERNELS unset "
            "for the definition, or draft a smaller tree"
        )
    found = _Scanned(logits)
    home = logits.device
    accepted = torch.empty(B, N, dtype=torch.bool, device=home)
    count, last = (torch.empty(B, dtype=torch.long, device=home) for _ in range(2))
    refused = torch.empty(B, N, dtype=torch.long, device=home)
    rest = torch.empty(B, dtype=torch.float64, device=home)
    above = tokens if ancestors is None else ancestors.view(torch.uint8)
    with at_home(logits):
        _path[(B,)](
            logits, tokens, parents, above, u, found.m, found.z, accepted.view(torch.uint8), count, last, refused, rest,
            N, found.parts, *logits.stride()[:2], tokens.stride(0), parents.stride(0), *above.stride()[:2], u.stride(0),
            CHAIN=ancestors is None, NODES=max(16, triton.next_power_of_2(N)), PARTS=room_for(found.parts), ROWS=16,
        )  # fmt: skip
    return Verified(accepted, count, last, pick(logits, last, (found.m, found.z), refused, rest))
