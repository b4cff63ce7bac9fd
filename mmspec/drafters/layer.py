"""The layer of a feature drafter: its inputs and outputs, which methods override, and its unrolled training steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.blocks import Block, attention
from mmspec.types import fold, gather_rows, unfold


@dataclass(frozen=True)
class EncodedPrompt:
    """The layer's inputs for the rows of a prompt, or in training of a whole text.

    Rows keep their order; padding may be on either side.
    """

    x: Tensor  # [B, n, inputs·H], input of the attention
    residual: Tensor  # [B, n, H], the residual stream
    positions: Tensor  # [B, n], rotary positions; those of text are the same without compression
    valid: Tensor  # bool [B, n], false on padding
    source: Tensor  # int64 [B, n], the target's row that this row replaces and predicts for; −1: a summary, or padding
    context: Tensor | None = None  # [B, n, C], context for `inputs` when these rows are continued in training
    onward: Tensor | None = None  # [B, 1, C], the same for rows after the prompt
    stats: dict[str, float] = field(default_factory=dict)  # more for `Stats.drafter`, summed over the batch


class FeatureLayer(nn.Module):
    """One layer that continues the target's features. Methods define its inputs (`inputs`) and its output (`carry`).

    Row j pairs the target's features at j with the embedding at j + 1. `encode_prompt` turns a prompt into rows: each
    goes through `inputs`, except that a method may compress or replace the visual ones.

    Under guidance a target has S > 1 streams: they share the tokens, each has its own features and cache, and the
    target's head merges them into one distribution. Outside the layer, streams are concatenated on the feature axis;
    the layer reads them as rows of a batch.
    """

    config: Any
    block: Block
    more: nn.ModuleDict  # the layers after it

    def inputs(self, embeds: Tensor, features: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(input of the attention, residual) from embeddings [B, n, H] and features: the target's [B, n, F] or its own.

        Args:
            context: [B, n or 1, C], of an EncodedPrompt or of the memory, if any.
        """
        raise NotImplementedError

    def encode_prompt(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        """The layer's inputs for L rows of the target, already paired: h_j with e_{j+1}.

        Args:
            embeds, features: [B, L, H] and [B, L, F].
            visual: int64 [B, L], of the embedding: k ≥ 1 at the tokens of the k-th image or video frame, 0 at text.
            valid: bool [B, L], false on padding, which is on one side.
            positions: [B, L], rotary positions.
        """
        x, residual = self.inputs(embeds, features)
        source = torch.arange(embeds.shape[1], device=embeds.device).expand(len(embeds), -1)
        return EncodedPrompt(x, residual, positions, valid, source)

    def carry(self, z: Tensor) -> Tensor:
        """The feature that the next step reads, from the layer's output."""
        return z

    def forward(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, steps: int, start: int = 0,
        rows: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Training-time test: the drafter's predictions up to `steps` tokens ahead, from many positions at once.

        Step i at base row j reads its own output of step i−1 at j and the embedding i tokens later; it attends to the
        real rows up to j and to its own rows of steps 1..i, exactly as in decoding (EAGLE-3, §3.2).

        Args:
            embeds: [B, T, S·H], embedding of the token after each row.
            features: [B, T, S·F], the target's features at each row.
            visual: int64 [B, T], of the token after each row, as in `encode_prompt`.
            valid: bool [B, T], false on padding.
            steps: ≥ 1.
            start: rotary position of row 0; with rope "2d" after a prompt of P tokens, 1 − P.
            rows: bool [B, T], the positions to predict from; None: all. The others are only keys, which costs little.

        Returns:
            `steps` tensors [B, T, S·H]; entry i at row j predicts the feature i + 1 rows later. Rows that were
            compressed away, or are not in `rows`, are zero.

        Raises:
            ValueError: a network with several layers or mask rows.
        """
        if self.more or getattr(self.config, "parallel", False):
            raise ValueError("a drafter of several layers, or with mask rows, cannot be trained here; leave these out")
        S = embeds.shape[-1] // self.config.hidden
        embeds, features = fold(embeds, S), fold(features, S)
        visual, valid = (t.repeat_interleave(S, 0) for t in (visual, valid))
        B, T, _ = embeds.shape
        positions = (start + torch.arange(T, device=embeds.device)).expand(B, T)
        e = self.encode_prompt(embeds, features, visual, valid, positions)
        go, source = selected(e.source, None if rows is None else rows.repeat_interleave(S, 0))
        x, residual, positions = (gather_rows(t, go) for t in (e.x, e.residual, e.positions))
        context = None if e.context is None else gather_rows(e.context, go)
        place, own = torch.arange(e.x.shape[1], device=go.device), torch.eye(go.shape[1], dtype=torch.bool)
        masks = [(place <= go[..., None]) & e.valid[:, None] | (place == go[..., None])]
        keys, values = ([t] for t in self.block.keys_values(e.x, e.positions))
        ahead, outputs = F.pad(embeds, (0, 0, 0, steps)), []
        for step in range(steps):

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                if masks[1:]:  # at step 0 they are among those of all rows
                    keys.append(k)
                    values.append(v)
                return attention(q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 2))

            if step:
                x, residual = self.inputs(gather_rows(ahead, source.clamp(min=0) + step), features, context)
                masks.append(own.to(go.device).expand(B, *own.shape))
            features = self.carry(self.block(x, residual, positions + step, attend))
            outputs.append(unfold(at_source(features, source, T), S))
        return outputs


def selected(source: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The layer's rows whose `source` is in `rows`, bool [B, T]: their indices [B, m] and `source`, −1 at padding."""
    wanted = source >= 0 if rows is None else (source >= 0) & rows.gather(1, source.clamp(min=0))
    m = int(wanted.sum(1).max())
    go = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :m]
    return go, torch.where(wanted, source, -1).gather(1, go)


def at_source(z: Tensor, source: Tensor, T: int) -> Tensor:
    """Outputs [B, n, H] scattered to their source rows, [B, T, H]; zeros at all others."""
    place = torch.where(source < 0, T, source)[:, :, None].expand_as(z)
    return z.new_zeros(len(z), T + 1, z.shape[2]).scatter(1, place, z)[:, :T]
