"""What feature drafters are built of: rotary positions, one Llama-style layer, the tree-shaped decoding around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.slots import Lengths, Slots, visibility

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, heads, n, D] → [B, heads, n, D]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding, halves convention (Su et al. 2021), tables in fp32.

    Args:
        x: [B, heads, n, D].
        positions: [B, n] (or [1, n]).
    """
    D = x.shape[-1]
    frequency = theta ** (torch.arange(0, D, 2, device=x.device, dtype=torch.float32) / -D)
    angle = positions[:, None, :, None].float() * frequency  # [B, 1, n, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """One decoder layer with fused projections. The attention may read a wider input than the residual stream has."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, theta: float, eps: float,
        inputs: int = 1, qkv_bias: bool = False, head_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.theta = heads, kv_heads, theta
        self.head_dim = head_dim or hidden // heads
        self.qkv = nn.Linear(inputs * hidden, (heads + 2 * kv_heads) * self.head_dim, bias=qkv_bias)
        self.out = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, n, inputs·H] is what attention reads, residual [B, n, H] what it adds to; returns [B, n, H]."""
        B, n, _ = x.shape
        heads = self.qkv(x).view(B, n, -1, self.head_dim).transpose(1, 2)
        turned = rotate(heads[:, : self.heads + self.kv_heads], positions, self.theta)
        o = attend(turned[:, : self.heads], turned[:, self.heads :], heads[:, self.heads + self.kv_heads :])
        x = residual + self.out(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention; `mask` bool [B or 1, n, T], true where visible."""
    mask = mask[:, None] if mask is not None else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass
class Memory:
    """A feature drafter's state: keys and values of the rows it has read, per sequence."""

    slots: Slots
    lengths: Lengths  # rows read, per sequence
    positions: Tensor  # [B], of the next row
    open_slots: Tensor  # bool [B, L], false at padding
    padded: bool  # whether any slot is closed, as the host knows it

    def select(self, rows: Tensor) -> Memory:
        self.slots.select(rows)
        return Memory(self.slots, self.lengths.select(rows), self.positions[rows], self.open_slots[rows], self.padded)

    def join(self, other: Memory) -> Memory:
        self.slots.join(other.slots)
        longest = max(self.open_slots.shape[1], other.open_slots.shape[1])
        open_slots = [F.pad(m.open_slots, (0, longest - m.open_slots.shape[1]), value=True) for m in (self, other)]
        positions = torch.cat([self.positions, other.positions])
        return Memory(
            self.slots, self.lengths.join(other.lengths), positions, torch.cat(open_slots), self.padded or other.padded
        )

    def attend(self, at: Lengths, ancestors: Tensor | None) -> Attend:
        """Attention over the rows read and the ones since; `ancestors` [B, n, M] over the M rows after the first
        `self.lengths`, of which the last n are being appended at `at`; None: everything is visible."""

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.slots.append(k, v, at)
            mask = None
            if ancestors is not None or self.padded or not at.even:
                seen = ancestors
                if seen is None:
                    seen = torch.ones(k.shape[0], q.shape[2], keys.shape[2] - self.lengths.longest, dtype=torch.bool)
                mask = visibility(self.lengths, self.open_slots, seen.to(q.device))
            return attention(q, keys, values, mask)

        return run


def path_after(session: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the last round decided, for a drafter to read.

    Returns:
        features [B, W, F] of the nodes that stand, the token [B, W] that follows each (the pending one follows the
        last), and the number [B] of them; entries past that number mean nothing.
    """
    last = session.last
    if last.scores.hidden is None:
        raise ValueError("the target handed over no features; the drafter must name them in `features`")
    kept, count = last.kept, last.verdict.count
    hidden = last.scores.hidden.gather(1, kept[:, :, None].expand(-1, -1, last.scores.hidden.shape[-1]))
    tokens = last.draft.tokens.gather(1, kept).clamp(min=0)
    follow = torch.cat([tokens[:, 1:], last.verdict.token[:, None]], 1)
    follow = follow.scatter(1, (count - 1)[:, None], last.verdict.token[:, None])
    return hidden, follow, count
