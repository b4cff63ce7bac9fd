"""The decoder layer of feature drafters (Llama's), and its rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.functional import Linear, linear, sdpa

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, heads, n, D] → [B, heads, n, D]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Block(nn.Module):
    """One decoder layer with fused projections. The attention's input may be wider than the residual stream."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, rope: Rope, eps: float,
        inputs: int = 1, qkv_bias: bool = False, head_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.rope = heads, kv_heads, rope
        self.head_dim = head_dim or hidden // heads
        self.qkv = Linear(inputs * hidden, (heads + 2 * kv_heads) * self.head_dim, bias=qkv_bias)
        self.out = Linear(heads * self.head_dim, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = Linear(hidden, 2 * intermediate, bias=False)
        self.down = Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, n, inputs·H] is the attention's input, residual [B, n, H] the residual stream; returns [B, n, H]."""
        B, n, _ = x.shape
        heads = self.qkv(x).view(B, n, -1, self.head_dim).transpose(1, 2)
        rotated = rotate(heads[:, : self.heads + self.kv_heads], positions, self.rope)
        o = attend(rotated[:, : self.heads], rotated[:, self.heads :], heads[:, self.heads + self.kv_heads :])
        x = residual + self.out(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Only the keys and values that `forward` would pass to `attend`, [B, kv_heads, n, D]."""
        B, n, _ = x.shape
        first = self.heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        heads = linear(x, self.qkv.weight[first:], bias).view(B, n, 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(heads[:, : self.kv_heads], positions, self.rope), heads[:, self.kv_heads :]


def beside(attend: Attend, streams: int) -> Attend:
    """Attention of [B·S, heads, n, D] computed as [B, S·heads, n, D]: a row's streams are heads of one cache."""
    if streams == 1:
        return attend

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (-1, streams)).flatten(1, 2) for t in (q, k, v))
        return attend(q, k, v).unflatten(1, (streams, -1)).flatten(0, 1)

    return run


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Softmax attention; `mask` bool [B or 1, n, T], true where visible."""
    return sdpa(q, k, v, None if mask is None else mask[:, None], scale)


# -- rotary positions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of queries and keys; a base class of drafters' configs.

    Attributes:
        rope: "1d", or "2d" for pictures: row and column of the input token, zero before the picture.
        grid: with "2d", tokens along a side of the picture.
        rope_theta: base of the frequencies.
        rope_share: share of each head's dimensions, the first ones, that are rotated.
        rope_kind: how the frequencies are scaled, one of ROPE_KINDS.
        rope_factor: the largest scaling factor.
        rope_low, rope_high: where scaling begins and ends: llama3's low and high frequency factors, YaRN's β_slow and
            β_fast.
        rope_trained: sequence length that the unscaled frequencies were trained for.
        rope_truncate: whether YaRN's bounds are rounded to whole dimensions.
        rope_gain: factor of cosine and sine (YaRN's attention factor).
        mrope: number of frequencies for time, height and width (M-RoPE sections); (): one axis for all.
        mrope_interleaved: whether the axes alternate (Qwen3-VL) instead of following each other (Qwen2-VL).
    """

    rope: str = "1d"
    grid: int = 0
    rope_theta: float = 10000.0
    rope_share: float = 1.0
    rope_kind: str = "default"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 32.0
    rope_trained: int = 0
    rope_truncate: bool = True
    rope_gain: float = 1.0
    mrope: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def check(self, width: int) -> None:
        """Check these values for heads of `width` dimensions. Raises ValueError: with the reason."""
        if self.rope not in ("1d", "2d") or (self.rope == "2d") is not (self.grid > 0):
            raise ValueError(f"rope is '1d' with grid 0, or '2d' with a grid ≥ 1; got {self.rope!r}, {self.grid!r}")
        if self.rope == "2d" and width % 4:
            raise ValueError(f"rope '2d' splits a head into quarters, so head_dim must be a multiple of 4, not {width}")
        if self.rope_kind not in ROPE_KINDS:
            raise ValueError(f"rope_kind must be one of {', '.join(ROPE_KINDS)}; got {self.rope_kind!r}")
        if self.rope_kind in ("llama3", "yarn") and not self.rope_trained:
            raise ValueError(f"rope_kind {self.rope_kind!r} needs rope_trained, the length that it was trained for")
        turned = self.turned(width)
        if not 2 <= turned <= width or turned % 2:
            raise ValueError(f"rope_share {self.rope_share} of {width} dimensions is no even number from 2 to {width}")
        if self.mrope and (len(self.mrope) != 3 or sum(self.mrope) != turned // 2):
            raise ValueError(f"the three sections of mrope must add up to {turned // 2}; got {list(self.mrope)}")

    def turned(self, width: int) -> int:
        """Number of rotated dimensions of a head."""
        return int(width * self.rope_share)

    def frequencies(self, turned: int, device: torch.device) -> Tensor:
        """float32 [turned / 2]."""
        plain = self.rope_theta ** (torch.arange(0, turned, 2, device=device, dtype=torch.float32) / -turned)
        return ROPE_KINDS[self.rope_kind](self, plain, turned)

    def angles(self, positions: Tensor, turned: int) -> Tensor:
        """Angles [B, n, turned / 2] of positions [B, n], or [B, n, 3] with M-RoPE, whose axes are equal for text."""
        if self.grid:
            place, frequency = positions.clamp(0, self.grid**2 - 1), self.frequencies(turned // 2, positions.device)
            axes = (place // self.grid, place % self.grid)
            return torch.cat([axis[..., None].float() * frequency for axis in axes], -1)
        frequency = self.frequencies(turned, positions.device)
        if positions.dim() == 2:
            return positions[..., None].float() * frequency
        return positions[..., self._axes(positions.device)].float() * frequency

    def _axes(self, device: torch.device) -> Tensor:
        """The axis of each frequency, [D/2]."""
        if not self.mrope_interleaved:
            axes = [axis for axis, count in enumerate(self.mrope) for _ in range(count)]
        else:
            axes = [i % 3 if i % 3 and i < 3 * self.mrope[i % 3] else 0 for i in range(sum(self.mrope))]
        return torch.tensor(axes, device=device)


Turn = tuple[Tensor, Tensor]  # cosines and sines [B, 1, n, turned / 2]


def turn(positions: Tensor, rope: Rope, width: int, dtype: torch.dtype) -> Turn:
    """Cosines and sines at these positions for heads of `width`; computed in float32, then cast to `dtype`.

    On a grid the first half of the angles depends on the row, the second on the column. Before the picture both are
    zero, which zeroes the rotated queries and keys (LlamaGen, Sun et al. 2024, and its published code).

    Args:
        positions: [B, n] (or [1, n]), or [B, n, 3]; on a grid, indices in reading order: negative before the picture,
            clamped at its end.
    """
    angle = rope.angles(positions, rope.turned(width))[:, None]
    cos, sin = angle.cos(), angle.sin()
    if rope.rope_gain != 1.0:
        cos, sin = cos * rope.rope_gain, sin * rope.rope_gain
    if rope.grid:
        inside = (positions >= 0)[:, None, :, None]
        cos, sin = cos * inside, sin * inside
    return cos.to(dtype), sin.to(dtype)


def turned(x: Tensor, by: Turn) -> Tensor:
    """Rotary position embedding of x [B, heads, n, D], halves convention (Su et al. 2021)."""
    (cos, sin), half = by, by[0].shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts if 2 * half == x.shape[-1] else [*parts, x[..., 2 * half :]], -1)


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """`turned` at these positions, see `turn`."""
    return turned(x, turn(positions, rope, x.shape[-1], x.dtype))


def _llama3(r: Rope, f: Tensor, turned: int) -> Tensor:
    """Stretch long waves, keep short ones, interpolate between (Llama 3.1's code)."""
    turns = r.rope_trained * f / (2 * math.pi)  # within the trained length
    share = ((turns - r.rope_low) / (r.rope_high - r.rope_low)).clamp(0, 1)
    return share * f + (1 - share) * f / r.rope_factor


def _yarn(r: Rope, f: Tensor, turned: int) -> Tensor:
    """The same, interpolated by dimension (Peng et al. 2023, YaRN, §3.2, and its code)."""

    def dimension(turns: float) -> float:
        return turned * math.log(r.rope_trained / (turns * 2 * math.pi)) / (2 * math.log(r.rope_theta))

    first, last = dimension(r.rope_high), dimension(r.rope_low)
    if r.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    place = torch.arange(turned // 2, device=f.device, dtype=torch.float32)
    share = 1 - ((place - first) / ((last - first) or 0.001)).clamp(0, 1)
    return share * f + (1 - share) * f / r.rope_factor


ROPE_KINDS: dict[str, Callable[[Rope, Tensor, int], Tensor]] = {
    "default": lambda r, f, turned: f,
    "linear": lambda r, f, turned: f / r.rope_factor,
    "llama3": _llama3,
    "yarn": _yarn,
}
