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


def rotate(x: Tensor, positions: Tensor, theta: float, grid: int = 0) -> Tensor:
    """Rotary position embedding, halves convention (Su et al. 2021), tables in fp32.

    On a grid the first half of the angles turns with the row, the second with the column, and what stands before the
    picture becomes zero, so that it weighs the same to everybody (LlamaGen, Sun et al. 2024, and its published code).

    Args:
        x: [B, heads, n, D].
        positions: [B, n] (or [1, n]); on a grid, places in reading order: below 0 before it, clamped at its end.
        grid: tokens along a side of the picture; 0: positions are in one dimension.
    """
    angle = _angles(positions, x.shape[-1], theta, grid)[:, None]  # [B, 1, n, D/2]
    cos, sin = angle.cos(), angle.sin()
    if grid:
        there = (positions >= 0)[:, None, :, None]
        cos, sin = cos * there, sin * there
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _angles(positions: Tensor, D: int, theta: float, grid: int) -> Tensor:
    """[B, n, D/2] of positions [B, n]."""
    turned = D // 2 if grid else D  # dimensions that turn with one and the same coordinate
    frequency = theta ** (torch.arange(0, turned, 2, device=positions.device, dtype=torch.float32) / -turned)
    if not grid:
        return positions[..., None].float() * frequency
    place = positions.clamp(0, grid * grid - 1)
    return torch.cat([axis[..., None].float() * frequency for axis in (place // grid, place % grid)], -1)


class Block(nn.Module):
    """One decoder layer with fused projections. The attention may read a wider input than the residual stream has."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, theta: float, eps: float,
        inputs: int = 1, qkv_bias: bool = False, head_dim: int | None = None, grid: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.theta, self.grid = heads, kv_heads, theta, grid
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
        turned = rotate(heads[:, : self.heads + self.kv_heads], positions, self.theta, self.grid)
        o = attend(turned[:, : self.heads], turned[:, self.heads :], heads[:, self.heads + self.kv_heads :])
        x = residual + self.out(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def fold(x: Tensor, streams: int) -> Tensor:
    """Streams from the feature axis to the batch axis, those of a row side by side: [B, n, S·F] to [B·S, n, F]."""
    if streams == 1:
        return x
    return x.unflatten(-1, (streams, -1)).transpose(1, 2).flatten(0, 1)


def unfold(x: Tensor, streams: int) -> Tensor:
    """And back: [B·S, n, F] to [B, n, S·F]."""
    if streams == 1:
        return x
    return x.unflatten(0, (-1, streams)).transpose(1, 2).flatten(2)


def beside(attend: Attend, streams: int) -> Attend:
    """Attention of [B·S, heads, n, D] as that of [B, S·heads, n, D]: a row's streams are heads of one memory."""
    if streams == 1:
        return attend

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (-1, streams)).flatten(1, 2) for t in (q, k, v))
        return attend(q, k, v).unflatten(1, (streams, -1)).flatten(0, 1)

    return run


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention; `mask` bool [B or 1, n, T], true where visible."""
    mask = mask[:, None] if mask is not None else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass
class Memory:
    """A feature drafter's state: keys and values of the rows it has read, per sequence; streams are further heads."""

    slots: Slots
    lengths: Lengths  # rows read, per sequence
    positions: Tensor  # [B], of the next row
    open_slots: Tensor  # bool [B, L], false at padding
    padded: bool  # whether any slot is closed, as the host knows it

    def select(self, rows: Tensor) -> Memory:
        self.slots.select(rows)
        return Memory(self.slots, self.lengths.select(rows), self.positions[rows], self.open_slots[rows], self.padded)

    def join(self, other: Memory) -> Memory:
        self.slots.join(other.slots, self.lengths.longest)
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
