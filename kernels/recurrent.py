"""A recurrent layer on a draft's tree: each program computes one head's nodes for some columns of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import BOOL, REAL, at_home, sizes
from mmspec.kernels.dispatch import RECURRENT_NODES


@triton.jit
def _tree(
    Q, K, V, BETA, G, STATE, SEEN, OUT, U, heads, n, D, E,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, s_b, s_h, s_d, s_e, a_b, a_n,
    DELTA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's reads and writes; the system is solved from the root down, in registers."""
    line = tl.program_id(0).to(tl.int64)
    b, h = line // heads, line % heads
    i, j, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    live, wide = i < n, e < E
    rows, columns = live[:, None] & (d < D)[None, :], live[:, None] & wide[None, :]
    q = tl.load(Q + b * q_b + h * q_h + i[:, None] * q_n + d[None, :], mask=rows, other=0.0)
    k = tl.load(K + b * k_b + h * k_h + i[:, None] * k_n + d[None, :], mask=rows, other=0.0)
    u = tl.load(V + b * v_b + h * v_h + i[:, None] * v_n + e[None, :], mask=columns, other=0.0)
    at = b * s_b + h * s_h + d[:, None] * s_d + e[None, :] * s_e
    state = tl.load(STATE + at, mask=(d < D)[:, None] & wide[None, :], other=0.0)
    g = tl.load(G + line * n + i, mask=live, other=0.0)
    across = tl.load(G + line * n + j, mask=j < n, other=0.0)
    seen = tl.load(SEEN + b * a_b + i[:, None] * a_n + j[None, :], mask=live[:, None] & (j < n)[None, :], other=0) != 0
    decay = tl.where(seen, tl.exp(tl.where(seen, g[:, None] - across[None, :], 0.0)), 0.0)
    if DELTA:
        beta = tl.load(BETA + line * n + i, mask=live, other=0.0)
        before = tl.dot(k, state, input_precision="ieee") * tl.exp(g)[:, None]
        u = (u - before) * beta[:, None]
        system = tl.dot(k, tl.trans(k), input_precision="ieee") * decay * beta[:, None]
        for node in range(1, n):
            mine = tl.sum(tl.where((i == node)[:, None] & (j < node)[None, :], system, 0.0), 0)
            read = tl.sum(mine[:, None] * u, 0)
            u = tl.where((i == node)[:, None], u - read[None, :], u)
    out = tl.dot(q, state, input_precision="ieee") * tl.exp(g)[:, None]
    reads = tl.dot(q, tl.trans(k), input_precision="ieee") * decay
    out += tl.dot(reads, u, input_precision="ieee")
    to = (line * n + i[:, None]) * E + e[None, :]
    tl.store(OUT + to, out, mask=columns)
    tl.store(U + to, u, mask=columns)


def recurrent_tree(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, G: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.recurrent_tree`; one decay for all channels, everything in float32. The state may be transposed
    in memory."""
    turned = state.shape[-1] > 1 and state.stride(-1) != 1
    dim = sizes(
        "recurrent_tree",
        q=(q, "B H n K", REAL),
        k=(k, "B H n K", REAL),
        v=(v, "B H n V", REAL),
        beta=(None if beta is None else beta.contiguous(), "B H n", REAL),
        G=(G.contiguous(), "B H n", REAL),
        state=(state.transpose(-1, -2), "B H V K", REAL) if turned else (state, "B H K V", REAL),
        ancestors=(ancestors, "B n n", BOOL),
    )
    B, H, n, D, E = (dim[name] for name in ("B", "H", "n", "K", "V"))
    if n > RECURRENT_NODES:
        raise ValueError(
            f"recurrent_tree: a tree has at most {RECURRENT_NODES} nodes by Triton, got {n}; leave MMSPEC_KERNELS "
            "unset to use the definition for larger ones"
        )
    out, u = (torch.empty(B, H, n, E, dtype=torch.float32, device=q.device) for _ in range(2))
    block = min(32, max(16, triton.next_power_of_2(E)))
    with at_home(q):
        _tree[(B * H, triton.cdiv(E, block))](
            q, k, v, G if beta is None else beta.contiguous(), G.contiguous(), state, ancestors.view(torch.uint8),
            out, u, H, n, D, E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *state.stride(),
            *ancestors.stride()[:2], DELTA=beta is not None, BLOCK_N=max(16, triton.next_power_of_2(n)),
            BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_E=block,
        )  # fmt: skip
    return out, u
