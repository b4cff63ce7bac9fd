"""The modules of a block drafter: layers that attend to the target's features, and heads that couple its tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.blocks import Attend, RMSNorm, Turn, turned
from mmspec.functional import Linear, linear

MARKOV = ("vanilla", "gated", "rnn")


class GroupedConv(nn.Module):
    """A causal convolution over the rows of a block whose weights depend on each row's input (DFlash2's code).

    One projection gives the weights of two convolutions, of a sublayer's input and of its output. The channels of a
    group share them. Both are initialised to the identity.
    """

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.eye(taps)[0].view(1, taps, 1).repeat(2, 1, hidden))
        self.kernel_projection = Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolved x [B, n, H], and the weights [B, n, taps, groups] for `after`."""
        taps = self.base_kernel.shape[1]
        before, after = self.kernel_projection(x).unflatten(-1, (2, taps, -1)).unbind(-3)
        return self._mixed(x, before, self.base_kernel[0]), after

    def after(self, x: Tensor, weights: Tensor) -> Tensor:
        return self._mixed(x, weights, self.base_kernel[1])

    def _mixed(self, x: Tensor, weights: Tensor, base: Tensor) -> Tensor:
        taps, groups = weights.shape[-2:]
        total = torch.zeros_like(x)
        for tap in range(taps):
            kernel = base[tap].view(groups, -1) + weights[..., tap, :, None]
            total = total + F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] * kernel.flatten(-2)
        return total


class BlockLayer(nn.Module):
    """A Qwen3-style layer over the rows of a block, which attend to keys and values of the target's features, too."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, eps: float,
        bias: bool = False, qk_norm: bool = True, rope_first: bool = False, taps: int = 0, group: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rope_first = rope_first
        self.input_norm = RMSNorm(hidden, eps)
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.out = Linear(heads * head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = Linear(hidden, 2 * intermediate, bias=False)
        self.down = Linear(intermediate, hidden, bias=False)
        self.attention_conv = GroupedConv(hidden, taps, group) if taps else None
        self.mlp_conv = GroupedConv(hidden, taps, group) if taps else None

    def forward(self, x: Tensor, by: Turn, attend: Attend, blocks: int = 1) -> Tensor:
        """x [B, blocks · n, H] of several blocks, which a convolution does not mix; `by` are the rotations of the rows'
        positions."""
        y, mixed = self._before(self.attention_conv, self.input_norm(x), blocks)
        q, k, v = self._split(self.qkv(y), (self.heads, self.kv_heads, self.kv_heads))
        q, k = self._turned(q, self.q_norm, by), self._turned(k, self.k_norm, by)
        y = self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        x = x + self._after(self.attention_conv, y, mixed, blocks)
        y, mixed = self._before(self.mlp_conv, self.mlp_norm(x), blocks)
        gate, up = self.gate_up(y).chunk(2, -1)
        return x + self._after(self.mlp_conv, self.down(F.silu(gate) * up), mixed, blocks)

    def keys_values(self, x: Tensor, by: Turn) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, n, D] of features x [B, n, H], without this layer's input norm."""
        first = self.heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        k, v = self._split(linear(x, self.qkv.weight[first:], bias), (self.kv_heads, self.kv_heads))
        return self._turned(k, self.k_norm, by), v

    def _split(self, x: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(heads, 1)

    def _turned(self, x: Tensor, norm: nn.Module, by: Turn) -> Tensor:
        return norm(turned(x, by)) if self.rope_first else turned(norm(x), by)  # type: ignore[no-any-return]

    @staticmethod
    def _before(conv: GroupedConv | None, x: Tensor, blocks: int) -> tuple[Tensor, Tensor | None]:
        if conv is None:
            return x, None
        y, mixed = conv(_apart(x, blocks))
        return y.reshape(x.shape), mixed

    @staticmethod
    def _after(conv: GroupedConv | None, x: Tensor, mixed: Tensor | None, blocks: int) -> Tensor:
        if conv is None or mixed is None:
            return x
        return conv.after(_apart(x, blocks), mixed).reshape(x.shape)


def _apart(x: Tensor, blocks: int) -> Tensor:
    return x if blocks == 1 else x.unflatten(1, (blocks, -1)).flatten(0, 1)


class MarkovHead(nn.Module):
    """Low-rank term W₂ f(W₁[token]) that the previous token adds to the logits of a row (DSpark's code).

    f is the identity ("vanilla"), a gate that the row's hidden state opens ("gated"), or one step of a recurrence
    along the block ("rnn").
    """

    def __init__(self, vocab: int, draft_vocab: int, hidden: int, rank: int, kind: str) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.w1 = nn.Embedding(vocab, rank)
        self.w2 = Linear(rank, draft_vocab, bias=False)
        nn.init.zeros_(self.w2.weight)  # adds nothing at first
        self.gate_proj = Linear(hidden + rank, rank) if kind == "gated" else None
        self.joint_proj = Linear(2 * rank + hidden, 3 * rank) if kind == "rnn" else None

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Added logits [B, k, V] after tokens [B, k], at the row of `hidden` [B, k, H], and the recurrence's state."""
        e = self.w1(before)
        if self.gate_proj is not None:
            e = e * self.gate_proj(torch.cat([hidden, e], -1)).sigmoid()
        elif self.joint_proj is not None:
            state = torch.zeros_like(e) if state is None else state
            gate, new, out = self.joint_proj(torch.cat([state, e, hidden], -1)).chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
            e = out.tanh()
        return self.w2(e), state


class Selector(nn.Module):
    """Rescores a row's likeliest tokens, given the previous token, by a product of three vectors (DFlash2's code)."""

    def __init__(self, vocab: int, hidden: int, rank: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.predecessor = nn.Parameter(0.02 * torch.randn(vocab, rank))
        self.successor = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden = Linear(hidden, rank, bias=False)

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
        """Logits [B, k, V] of tokens after `before` [B, k]: the `top` ones of `logits` rescored, all others −∞."""
        best, ids = logits.topk(min(self.top, logits.shape[-1]), -1)
        context = self.predecessor[before] * self.hidden(hidden)  # [B, k, rank]
        scores = best + (context[..., None, :] * self.successor[ids]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)


class ConfidenceHead(nn.Module):
    """The probability that a row's token is accepted, from its hidden state and optionally the last token (DSpark)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Linear(width, 1)

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Probabilities [B] from [B, H] and, of the Markov head, [B, rank]."""
        return self.proj(hidden if before is None else torch.cat([hidden, before], -1))[..., 0].sigmoid()
