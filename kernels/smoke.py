"""A small test case of tree attention, with which its kernel is tested on the user's device before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.kernels import reference

Sizes = dict[str, int]
Arguments = dict[str, Any]

# Allowed (relative, absolute) difference from the definition, by the dtype of the input: sums of up to 10⁴ products in
# another order, outputs of magnitude 1.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-6, 2e-6),
    # the result is rounded to 8 bits, and so are the weights before the product with the values: two half-steps of 2⁻⁸
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float16: (2e-3, 2e-3),  # likewise with 11 bits
}


def parents(batch: int, nodes: int) -> Tensor:
    """Random trees, int64 [B, N]."""
    above = torch.rand(batch, nodes) * torch.arange(nodes)
    return above.long().clamp(min=0)


def ancestors(parents: Tensor) -> Tensor:
    """bool [B, N, N], a node is its own ancestor."""
    B, N = parents.shape
    seen = torch.eye(N, dtype=torch.bool).repeat(B, 1, 1)
    for node in range(1, N):
        seen[:, node] |= seen[torch.arange(B), parents[:, node]]
    return seen


def attention(n: Sizes, device: torch.device, dtype: torch.dtype) -> Arguments:
    B, N, T = n["B"], n["N"], n["T"]
    lengths = (T - N - torch.randint(0, max(1, T // 4), (B,))).clamp(min=0)
    lengths[0] = T - N  # the longest row; the others end with unused slots
    keys, values = torch.randn(2, B, n["kv_heads"], T, n["D"], dtype=dtype)
    for b in range(B):
        keys[b, :, lengths[b] + N :] = values[b, :, lengths[b] + N :] = torch.nan
    return {
        "q": torch.randn(B, n["heads"], N, n["D"], dtype=dtype).to(device),
        "keys": keys.to(device),
        "values": values.to(device),
        "lengths": lengths.to(device),
        "bits": reference.bit_rows(ancestors(parents(B, N))).to(device),
    }


def near(a: Tensor, b: Tensor, relative: float, absolute: float) -> Tensor:
    """Whether each entry of a result is within the tolerance of the expected one."""
    exact = not a.is_floating_point() or relative == absolute == 0
    a, b = (t if exact else t.double() for t in (a, b))
    return (a == b) | (a.isnan() & b.isnan()) if exact else (a - b).abs() <= absolute + relative * b.abs()
