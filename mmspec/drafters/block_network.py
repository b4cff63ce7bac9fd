"""The network of a block drafter: layers that attend to the target's features, and heads that couple its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.block_config import NO_CAP, BlockConfig
from mmspec.drafters.blocks import Attend, RMSNorm, Turn, attention, turn, turned
from mmspec.drafters.growth import head_of
from mmspec.drafters.layer import at_source, selected
from mmspec.functional import Linear, linear
from mmspec.protocols import Target
from mmspec.types import gather_rows


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

    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim or c.hidden // c.heads
        self.rope_first = c.rope_first
        self.input_norm = RMSNorm(c.hidden, c.norm_eps)
        self.qkv = Linear(c.hidden, (c.heads + 2 * c.kv_heads) * self.head_dim, bias=c.bias)
        self.out = Linear(c.heads * self.head_dim, c.hidden, bias=c.bias)
        self.q_norm = RMSNorm(self.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(c.hidden, c.norm_eps)
        self.gate_up = Linear(c.hidden, 2 * c.intermediate, bias=False)
        self.down = Linear(c.intermediate, c.hidden, bias=False)
        self.attention_conv = GroupedConv(c.hidden, c.taps, c.group) if c.taps else None
        self.mlp_conv = GroupedConv(c.hidden, c.taps, c.group) if c.taps else None

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


class BlockNetwork(nn.Module):
    """Denoises the rows of the pending token and mask tokens in one pass, and computes the logits of each row."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = c = config
        reads = len(c.features) * (c.target_hidden or c.hidden)
        self.fc = Linear(reads, c.hidden, bias=False)
        self.hidden_norm = RMSNorm(c.hidden, c.norm_eps)
        self.layers: Sequence[BlockLayer] = nn.ModuleList(  # type: ignore[assignment]  # torch's type does not say of what
            BlockLayer(c) for _ in range(c.layers)
        )
        self.out_norm = RMSNorm(c.hidden, c.norm_eps)
        rows = c.draft_vocab or c.vocab
        self.markov = MarkovHead(c.vocab, rows, c.hidden, c.markov_rank, c.markov) if c.markov_rank else None
        read = c.hidden + c.markov_rank * c.confidence_markov
        self.confidence = ConfidenceHead(read) if c.confidence else None
        self.selector = Selector(c.vocab, c.hidden, c.selector_rank, c.selector_top) if c.selector_rank else None
        self.head = head_of(c.hidden, c.draft_vocab)

    def _turn(self, positions: Tensor) -> Turn:
        return turn(positions, self.config, self.layers[0].head_dim, self.fc.weight.dtype)

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [..., V_d] of every row, independent of the tokens before it."""
        c = self.config
        logits = self.head.logits(hidden, target).float() * c.logit_scale
        return logits if c.softcap >= NO_CAP else (logits / c.softcap).tanh() * c.softcap

    def after(
        self, logits: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, k, V_d] of a row after each of the target's tokens `before` [B, k], and the next row's state.

        Args:
            logits, hidden: [B, 1 or k, …] of the row.
        """
        hidden = hidden.expand(-1, before.shape[1], -1)
        logits = logits.expand(-1, before.shape[1], -1)
        if self.markov is not None:
            added, state = self.markov(before, hidden, state)
            logits = logits + added.float()
        return logits if self.selector is None else self.selector(logits, before, hidden), state

    def trust(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The probability that the token at rows [..., H] is accepted after tokens [...].

        Raises ValueError: it has no confidence head.
        """
        if self.confidence is None:
            raise ValueError("this drafter has no confidence head")
        embedding = self.markov.w1(before) if self.config.confidence_markov and self.markov is not None else None
        return self.confidence(hidden, embedding)  # type: ignore[no-any-return]

    def forward(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, steps: int, start: int = 0,
        rows: Tensor | None = None, mask: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Predictions of blocks at many anchors; arguments and results as in `FeatureLayer.forward`.

        Row j of `embeds` is the anchor at j + 1, whose block sees the features up to j; entry i predicts the target's
        final feature i + 1 rows later.

        Args:
            mask: [H], embedding of the mask token.

        Raises:
            ValueError: more steps than a block drafts, or no mask.
        """
        c, (B, T, _) = self.config, embeds.shape
        if mask is None or steps > c.most:
            raise ValueError(f"a block of {c.block} learns {c.most} steps, with the mask's embedding; got {steps}")
        place = torch.arange(T, device=embeds.device)
        go, source = selected(torch.where(valid, place, -1), rows)
        m, n = go.shape[1], steps + (not c.anchored)
        x = torch.cat([gather_rows(embeds, go)[:, :, None], mask.expand(B, m, n - 1, -1)], 2).flatten(1, 2)
        row = torch.arange(n, device=embeds.device)
        by, whole = self._turn((start + 1 + go[:, :, None] + row).flatten(1)), self._turn((start + place).expand(B, T))
        context = self.hidden_norm(self.fc(features))
        for i, layer in enumerate(self.layers):
            x = layer(x, by, self._among(layer.keys_values(context, whole), go, valid, n, i), m)
        rows_out = self.out_norm(x).unflatten(1, (m, n))[:, :, n - steps :]
        return [at_source(z, source, T) for z in rows_out.unbind(2)]

    def _among(self, context: tuple[Tensor, Tensor], go: Tensor, valid: Tensor, n: int, i: int) -> Attend:
        """Attention of several blocks of a row, each over the features up to its anchor's row and over itself."""
        c, (B, m), T = self.config, go.shape, valid.shape[1]
        window, causal = c.each(c.windows)[i], c.each(c.causal)[i]
        row = torch.arange(n, device=go.device)
        there = (torch.arange(T, device=go.device) - go[:, :, None] - 1)[:, :, None]  # [B, m, 1, T], from the anchor
        near = within(window, there, row[:, None], c.from_anchor) if window else True
        past = (there < 0) & valid[:, None, None] & near
        inside = torch.ones(n, n, dtype=torch.bool, device=go.device)
        inside = inside.tril() if causal else inside
        own = torch.block_diag(*[inside] * m).expand(B, m * n, m * n)
        mask = torch.cat([past.expand(B, m, n, T).flatten(1, 2), own], 2)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, torch.cat([context[0], k], 2), torch.cat([context[1], v], 2), mask)

        return run


def within(window: int, there: Tensor, row: Tensor, from_anchor: bool) -> Tensor:
    """Whether keys at `there` (0 at the anchor, negative before it) are within the window of a block's rows."""
    near = (there >= -window) if from_anchor else ((row - there).abs() < window)
    return near | (there >= 0) if from_anchor else near
