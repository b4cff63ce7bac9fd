"""The network of a block drafter: layers over the rows of a block, heads that couple its tokens, and its training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmspec.drafters.block_config import NO_CAP, BlockConfig
from mmspec.drafters.blocks import Attend, RMSNorm, Turn, attention, turn
from mmspec.drafters.dflash_layer import BlockLayer, ConfidenceHead, MarkovHead, Selector
from mmspec.drafters.growth import head_of
from mmspec.drafters.layer import at_source, selected
from mmspec.functional import Linear
from mmspec.protocols import Target
from mmspec.types import gather_rows


class BlockNetwork(nn.Module):
    """Denoises the rows of the pending token and mask tokens in one pass, and computes the logits of each row."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = c = config
        width, reads = c.head_dim or c.hidden // c.heads, len(c.features) * (c.target_hidden or c.hidden)
        self.fc = Linear(reads, c.hidden, bias=False)
        self.hidden_norm = RMSNorm(c.hidden, c.norm_eps)
        self.layers: Sequence[BlockLayer] = nn.ModuleList(  # type: ignore[assignment]  # torch's type does not say of what
            BlockLayer(
                c.hidden, c.intermediate, c.heads, c.kv_heads, width, c.norm_eps, bias=c.bias, qk_norm=c.qk_norm,
                rope_first=c.rope_first, taps=c.taps, group=c.group,
            )
            for _ in range(c.layers)
        )  # fmt: skip
        self.out_norm = RMSNorm(c.hidden, c.norm_eps)
        rows = c.draft_vocab or c.vocab
        self.markov = MarkovHead(c.vocab, rows, c.hidden, c.markov_rank, c.markov) if c.markov_rank else None
        read = c.hidden + c.markov_rank * c.confidence_markov
        self.confidence = ConfidenceHead(read) if c.confidence else None
        self.selector = Selector(c.vocab, c.hidden, c.selector_rank, c.selector_top) if c.selector_rank else None
        self.head = head_of(c.hidden, c.draft_vocab)

    def _turn(self, positions: Tensor) -> Turn:
        return turn(positions, self.config, self.layers[0].head_dim, self.fc.weight.dtype)

    def _each(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return values if len(values) == self.config.layers else values * self.config.layers

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

        Raises:
            ValueError: it has no confidence head.
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
        window, causal = self._each(c.windows)[i], self._each(c.causal)[i]
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
