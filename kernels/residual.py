"""Sampling from the residual of p: normalisers, then partial sums of the weights, then the token within one part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import BOOL, DOUBLE, FLOATS, INDEX, PARTS, at_home, sizes, splits_for
from mmspec.kernels.reference import NOTHING as _NOTHING

_BLOCK = 2048
NOTHING = tl.constexpr(_NOTHING)


def scanned(logits: Tensor, lines: int, vocab: int, block: int) -> tuple[int, int]:
    """Length of the parts that lines of logits are split into, a multiple of the block, and their number."""
    block = min(block, triton.next_power_of_2(vocab))
    parts = splits_for(logits, lines, vocab, block)
    chunk = triton.cdiv(triton.cdiv(vocab, parts), block) * block
    return chunk, triton.cdiv(vocab, chunk)


@triton.jit(do_not_specialize=["parts"])
def _normalise(X, M, L, V, chunk, parts, x_b, BLOCK: tl.constexpr):
    """Maximum and sum of exponentials, float64, of one part of a row."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, z = tl.full([], -float("inf"), tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, V), BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(X + b * x_b + v, mask=v < V, other=-float("inf")).to(tl.float64)
        top = tl.maximum(m, tl.max(x, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        z = z * tl.exp(m - safe) + tl.sum(tl.exp(x - safe), 0)
        m = top
    tl.store(M + b * parts + part, m)
    tl.store(L + b * parts + part, z)


@triton.jit
def _log_z(M, L, line, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    m = tl.load(M + line * parts + part, mask=part < parts, other=-float("inf")).to(tl.float64)
    z = tl.load(L + line * parts + part, mask=part < parts, other=0.0).to(tl.float64)
    top = tl.max(m, 0)
    return top + tl.log(tl.sum(tl.where(z > 0, z * tl.exp(m - top), 0.0), 0))


@triton.jit
def _weights(
    P, Q, REFUSED, b, v, V, start, K, log_p, log_q, refused_b, subtract, BLOCK: tl.constexpr,
    HAS_Q: tl.constexpr, HAS_REFUSED: tl.constexpr,
):  # fmt: skip
    """p of tokens [BLOCK], float64, and its residual."""
    p = tl.exp(tl.load(P + v, mask=v < V, other=-float("inf")).to(tl.float64) - log_p)
    left = p
    if HAS_Q:
        q = tl.exp(tl.load(Q + v, mask=v < V, other=-float("inf")).to(tl.float64) - log_q)
        left = tl.where(subtract, tl.maximum(p - q, 0.0), p)
    if HAS_REFUSED:
        for i in range(0, K):
            gone = tl.load(REFUSED + b * refused_b + i)
            if (gone >= start) & (gone < start + BLOCK):
                left = tl.where((v == gone) & subtract, 0.0, left)
    return p, left


@triton.jit(do_not_specialize=["parts", "parts_p", "parts_q"])
def _weigh(
    P, Q, NODE, REFUSED, ROWS, PM, PL, QM, QL, LEFT, WHOLE,
    V, N, K, chunk, parts, p_b, p_n, q_b, refused_b, parts_p, parts_q,
    HAS_Q: tl.constexpr, HAS_NODE: tl.constexpr, HAS_REFUSED: tl.constexpr, HAS_ROWS: tl.constexpr,
    PARTS_P: tl.constexpr, PARTS_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of the residual and of p over one part of a row."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    node = tl.full([], 0, tl.int64)
    if HAS_NODE:
        node = tl.load(NODE + b)
    log_p, log_q, subtract = _log_z(PM, PL, b * N + node, parts_p, PARTS_P), 0.0, tl.full([], 1, tl.int1)
    if HAS_Q:
        log_q = _log_z(QM, QL, b, parts_q, PARTS_Q)
    if HAS_ROWS:
        subtract = tl.load(ROWS + b) != 0
    left, whole = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, V), BLOCK):
        v = start + tl.arange(0, BLOCK)
        p, rest = _weights(
            P + b * p_b + node * p_n, Q + b * q_b, REFUSED, b, v, V, start, K, log_p, log_q, refused_b, subtract,
            BLOCK, HAS_Q, HAS_REFUSED,
        )  # fmt: skip
        left += tl.sum(rest, 0)
        whole += tl.sum(p, 0)
    tl.store(LEFT + b * parts + part, left)
    tl.store(WHOLE + b * parts + part, whole)


@triton.jit(do_not_specialize=["parts", "parts_p", "parts_q"])
def _pick(
    P, Q, NODE, REFUSED, ROWS, PM, PL, QM, QL, LEFT, WHOLE, U, OUT,
    V, N, K, chunk, parts, p_b, p_n, q_b, refused_b, parts_p, parts_q,
    HAS_Q: tl.constexpr, HAS_NODE: tl.constexpr, HAS_REFUSED: tl.constexpr, HAS_ROWS: tl.constexpr,
    PARTS: tl.constexpr, PARTS_P: tl.constexpr, PARTS_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulated weight exceeds u times the total: its part by the sums, then inside it."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.full([], 0, tl.int64)
    if HAS_NODE:
        node = tl.load(NODE + b)
    log_p, log_q, subtract = _log_z(PM, PL, b * N + node, parts_p, PARTS_P), 0.0, tl.full([], 1, tl.int1)
    if HAS_Q:
        log_q = _log_z(QM, QL, b, parts_q, PARTS_Q)
    if HAS_ROWS:
        subtract = tl.load(ROWS + b) != 0
    i = tl.arange(0, PARTS)
    left = tl.load(LEFT + b * parts + i, mask=i < parts, other=0.0)
    some = tl.sum(left, 0) > 0  # otherwise the residual is zero by rounding: draw from p
    whole = tl.load(WHOLE + b * parts + i, mask=i < parts, other=0.0)
    lawful = tl.sum(whole, 0) > 0  # 1 but for rounding, or NaN
    left = tl.where(some, left, whole)
    subtract = subtract & some
    cumulated = tl.cumsum(left, 0)
    threshold = tl.load(U + b) * tl.max(cumulated, 0)
    most = tl.max(tl.where(left > 0, i, 0), 0)
    part = tl.minimum(tl.sum((cumulated <= threshold).to(tl.int32), 0), most)
    base = tl.sum(tl.where(i == part - 1, cumulated, 0.0), 0)
    token, last = tl.full([], 2147483647, tl.int32), tl.full([], 0, tl.int32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, V), BLOCK):
        v = start + tl.arange(0, BLOCK)
        p, rest = _weights(
            P + b * p_b + node * p_n, Q + b * q_b, REFUSED, b, v, V, start, K, log_p, log_q, refused_b, subtract,
            BLOCK, HAS_Q, HAS_REFUSED,
        )  # fmt: skip
        rest = tl.where(some, rest, p)
        over = (base + tl.cumsum(rest, 0) > threshold) & (rest > 0)
        token = tl.minimum(token, tl.min(tl.where(over, v, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(rest > 0, v, 0), 0))
        base += tl.sum(rest, 0)
    token = tl.where(token < 2147483647, token, last)  # rounding may carry u to the total
    tl.store(OUT + b, tl.where(lawful, token, NOTHING).to(tl.int64))


def pick(
    p: Tensor,
    node: Tensor | None,
    stat_p: tuple[Tensor, Tensor],
    refused: Tensor | None,
    u: Tensor,
    q: Tensor | None = None,
    stat_q: tuple[Tensor, Tensor] | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """A draw from the residual of p [B, V], or of p [B, N, V] at node [B]; the statistics come from the scans."""
    B, V = len(p), p.shape[-1]
    block = min(_BLOCK, triton.next_power_of_2(V))
    chunk, parts = scanned(p, B, V, block)
    left, whole = torch.empty(2, B, parts, dtype=torch.float64, device=p.device)
    out = torch.empty(B, dtype=torch.long, device=p.device)
    stat_q = stat_q or stat_p
    read = (
        p, p if q is None else q, out if node is None else node, out if refused is None else refused,
        out if rows is None else rows.view(torch.uint8), *stat_p, *stat_q, left, whole,
    )  # fmt: skip
    shape = (
        V, 1 if node is None else p.shape[1], 0 if refused is None else refused.shape[1], chunk, parts,
        p.stride(0), 0 if node is None else p.stride(1), 0 if q is None else q.stride(0),
        0 if refused is None else refused.stride(0), stat_p[0].shape[-1], stat_q[0].shape[-1],
    )  # fmt: skip
    kinds = {
        "HAS_Q": q is not None,
        "HAS_NODE": node is not None,
        "HAS_REFUSED": refused is not None,
        "HAS_ROWS": rows is not None,
        "PARTS_P": PARTS,
        "PARTS_Q": PARTS,
        "BLOCK": block,
    }
    with at_home(p):
        _weigh[(B, parts)](*read, *shape, **kinds)
        _pick[(B,)](*read, u, out, *shape, PARTS=PARTS, **kinds)
    return out


def residual_sample(
    p: Tensor,
    u: Tensor,
    q: Tensor | None = None,
    refused: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """See `reference.residual_sample`; no distribution is written to memory.

    Two passes over the logits, and one part of them a third time: (p − q)+ cannot be summed before both normalisers are
    known. Three launches, four with q.
    """
    dim = sizes(
        "residual_sample",
        p=(p, "B V", FLOATS),
        u=(u, "B", DOUBLE),
        q=(q, "B V", FLOATS),
        refused=(refused, "B K", INDEX),
        rows=(rows, "B", BOOL),
    )
    if q is not None and refused is not None:
        raise ValueError("residual_sample: give q, or the tokens that were refused, not both")
    stats = []
    for logits in (p, q):
        if logits is None:
            continue
        block = min(_BLOCK, triton.next_power_of_2(dim["V"]))
        chunk, parts = scanned(logits, dim["B"], dim["V"], block)
        m, z = torch.empty(2, dim["B"], parts, dtype=torch.float64, device=p.device)
        with at_home(p):
            _normalise[(dim["B"], parts)](logits, m, z, dim["V"], chunk, parts, logits.stride(0), BLOCK=block)
        stats.append((m, z))
    return pick(p, None, stats[0], refused, u, q, stats[1] if q is not None else None, rows)
