"""FLASH: images compressed to a few latents, and several tokens predicted in one pass of the drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.config import Options, one_of
from mmspec.drafters.blocks import RMSNorm
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.growth import weighed
from mmspec.drafters.layer import EncodedPrompt
from mmspec.drafters.memory import FeatureMemory
from mmspec.drafters.shape import Shape, TreeOptions
from mmspec.drafters.spans import runs, shares, spans_of, splice, spliced
from mmspec.functional import Linear
from mmspec.protocols import SessionView, Target

PUBLISHED = "published"
_STATIC = Shape(tree="mc_sim_7b_63")


@dataclass(frozen=True)
class FlashConfig(EagleConfig):
    """An EagleConfig and FLASH's two additions: heads for several tokens, and latents for images.

    Attributes:
        tokens: number of tokens predicted in one pass, K; 1: no heads, it drafts token by token as EAGLE does.
        head_width: width of the layer that the K heads share; 0: half of `hidden`.
        latents: largest number of latents per image or frame; 0: no compression.
        least: smallest number of latents.
        ratio: visual rows per latent, between these bounds (published: 576 rows to 64 latents).
        formula: of the latents, "normed" or "published", see LatentCompressor.
        heads_as: "residual" or "published", see FlashHeads.
    """

    input_norm: bool = True
    shape: Shape = _STATIC
    tokens: int = 5
    head_width: int = 0
    latents: int = 64
    least: int = 4
    ratio: float = 9.0
    formula: str = "normed"
    heads_as: str = "residual"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise ValueError(f"tokens must be ≥ 1; got {self.tokens!r}")
        one_of("formula", self.formula, ("normed", PUBLISHED))
        one_of("heads_as", self.heads_as, ("residual", PUBLISHED))
        if self.latents < 0 or (self.latents and not 1 <= self.least <= self.latents) or self.ratio < 1:
            raise ValueError(
                "latents is 0, or 1 ≤ least ≤ latents with a ratio ≥ 1; got "
                f"latents={self.latents!r}, least={self.least!r}, ratio={self.ratio!r}"
            )


class LatentCompressor(nn.Module):
    """Learned queries A that read an image's features F: softmax(s · A norm(F)ᵀ) F (FLASH, arXiv 2505.12728, §3).

    The paper's formula, softmax(A Fᵀ) F, has neither norm nor scale (`formula="published"`). With products over
    thousands of channels this softmax almost selects a single row; so by default F is normed, and s is learned,
    initially 1/√width. Longer spans use more of the queries, at even strides. Each query also has an embedding, which
    replaces the next token's.
    """

    def __init__(self, config: FlashConfig, width: int) -> None:
        super().__init__()
        self.least, self.ratio = config.least, config.ratio
        self.queries = nn.Parameter(torch.randn(config.latents, width))
        self.embed = nn.Parameter(0.02 * torch.randn(config.latents, config.hidden))
        self.normed = config.formula != PUBLISHED
        if self.normed:
            self.norm = RMSNorm(width, config.norm_eps)
            self.scale = nn.Parameter(torch.tensor(width**-0.5))

    def count(self, length: Tensor) -> Tensor:
        """Number of latents [R] for spans of `length` rows, at most `length`."""
        wanted = (length / self.ratio).round().long().clamp(self.least, len(self.queries))
        return wanted.minimum(length)

    def forward(self, features: Tensor, valid: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [R, C, H] and latents [R, C, F] of features [R, n, F], `valid` [R, n]."""
        number = torch.arange(int(count.max()), device=count.device) * len(self.queries) // count[:, None]
        number = number.clamp(max=len(self.queries) - 1)  # past a span's own count
        queries, keys = self.queries[number], features
        if self.normed:
            queries, keys = self.scale * queries, self.norm(features)
        scores = queries @ keys.transpose(1, 2)
        weights = scores.float().masked_fill(~valid[:, None], -torch.inf).softmax(-1)
        return self.embed[number], weights.to(features.dtype) @ features


class FlashHeads(nn.Module):
    """K features from one: h itself, then for each further one h + W_i SiLU(W h); W is shared, W_i is zero at first.

    Ours: the published head is one wide network without norm or residual, W₂ SiLU(W₁ h) with 4·H hidden units and
    biases, whose code does not run (`heads_as="published"`). This one starts as the plain layer, has a fraction of its
    weights, and its first feature is the same as EAGLE's output.
    """

    def __init__(self, config: FlashConfig) -> None:
        super().__init__()
        H, self.residual = config.hidden, config.heads_as != PUBLISHED
        width = (config.head_width or H // 2) if self.residual else 4 * H
        self.down = Linear(H, width, bias=not self.residual)
        self.up = Linear(width, (config.tokens - self.residual) * H, bias=not self.residual)
        if self.residual:
            nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor) -> Tensor:
        """[…, K, H] of h […, H]."""
        ahead: Tensor = self.up(F.silu(self.down(h))).unflatten(-1, (-1, h.shape[-1]))
        return torch.cat([h[..., None, :], h[..., None, :] + ahead], -2) if self.residual else ahead


class FlashDrafter(EagleDrafter):
    """Latent-aware compression and semi-autoregressive drafting (FLASH, arXiv 2505.12728).

    The layer's output at row j predicts the target's features at j + 1 … j + K at once, so a draft costs one pass: head
    i fills level i of the tree, independent of the tokens above. Latents have evenly spaced positions in their image.
    """

    method = "flash"
    Config = FlashConfig
    config: FlashConfig
    sees = True

    def __init__(self, config: FlashConfig) -> None:
        super().__init__(config)
        c, reads = config, len(config.features) * (config.target_hidden or config.hidden)
        if c.latents:
            self.latent = LatentCompressor(c, reads)
        if c.tokens > 1:
            self.heads = FlashHeads(c)

    def chosen(self, given: Options) -> TreeOptions:
        options = super().chosen(given)
        if self.config.tokens > 1 and options.depth > self.config.tokens:
            raise ValueError(
                f"this drafter predicts {self.config.tokens} tokens a pass, so depth and tree can be no deeper; "
                f"got depth {options.depth}"
            )
        return options

    # -- inputs ------------------------------------------------------------------------------------------------------

    def encode_prompt(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        spans = runs(visual * valid)
        if not self.config.latents or not spans:
            return super().encode_prompt(embeds, features, visual, valid, positions)
        rows, inside = spans_of(features, spans)
        length = inside.sum(1)
        count = self.latent.count(length)
        e, f = self.latent(rows, inside, count)
        _, last, ok = shares(length, count)
        index, real, source = splice(valid, spans, count.tolist())
        x, residual = self.inputs(spliced(embeds, e[ok], index), spliced(features, f[ok], index))
        places = spliced(positions, spans_of(positions, spans)[0].gather(1, last)[ok], index)
        return EncodedPrompt(x, residual, places, real, source)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def carry(self, z: Tensor) -> Tensor:
        """The layer's output, which the heads read; without heads as in EAGLE."""
        return z if self.config.tokens > 1 else super().carry(z)

    def ahead(self, h: Tensor) -> Tensor:
        """The features [B, n, K, H] of the next K rows, from the layer's output [B, n, H]."""
        return super().carry(self.heads(h))

    def levels(self, session: SessionView[FeatureMemory], target: Target, f: Tensor) -> Tensor | None:
        """Logits of each level by its own head, from the last row's output f [B, 1, H]."""
        if self.config.tokens == 1:
            return super().levels(session, target, f)
        depth = self.options.depth
        return weighed(self, session, target, self.ahead(f)[:, 0, :depth], torch.arange(depth, device=f.device))

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, steps: int, start: int = 0,
        rows: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """The predictions of the first `steps` ≤ K heads, from many positions at once; see `FeatureLayer.forward`.

        Raises ValueError: more steps than heads.
        """
        if self.config.tokens == 1:
            return super().forward(embeds, features, visual, valid, steps, start, rows)
        if steps > self.config.tokens:
            raise ValueError(f"this drafter predicts {self.config.tokens} tokens a pass; got {steps} steps")
        [h] = super().forward(embeds, features, visual, valid, 1, start, rows)
        return list(self.ahead(h)[:, :, :steps].unbind(2))
