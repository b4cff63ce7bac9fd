"""ViSpec: reads each image as a few learned summaries, and adds one global image vector to all later text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.drafters.blocks import attention
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.layer import EncodedPrompt
from mmspec.drafters.spans import runs, spans_of, splice, spliced
from mmspec.functional import Linear, linear
from mmspec.types import gather_rows

MEDIA = ("merge", "split")


@dataclass(frozen=True)
class ViSpecConfig(EagleConfig):
    """An EagleConfig with EAGLE-1/2's layer, and:

    Attributes:
        num_q: vectors per image of the adaptor: num_q − 1 summaries and the global one. Published: 2.
        media: treat adjacent images and the frames of a video as one image ("merge", as published), or each separately
            ("split", ours).
        summaries, global_vector: false turns one of the two off (an ablation).
    """

    num_q: int = 2
    media: str = "split"
    summaries: bool = True
    global_vector: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only_final("ViSpec")
        if self.num_q < 1 or self.media not in MEDIA:
            raise ValueError(
                f"ViSpec needs num_q ≥ 1 and media from {', '.join(MEDIA)}; got {self.num_q}, {self.media!r}"
            )


class Adaptor(nn.Module):
    """Learned queries attend to the embeddings of one image: one attention without norm, residual or positions."""

    def __init__(self, config: ViSpecConfig) -> None:
        super().__init__()
        H, heads = config.hidden, config.heads
        D = config.head_dim or H // heads
        self.q = nn.Parameter(torch.randn(config.num_q, heads, D) * D**-0.5)
        self.kv = Linear(H, 2 * heads * D, bias=config.qkv_bias)
        self.out = Linear(heads * D, H, bias=False)

    def forward(self, images: Tensor, real: Tensor) -> Tensor:
        """[R, num_q, H] of R images [R, n, H], of which `real` [R, n] is not padding."""
        (R, n, _), (num_q, heads, D) = images.shape, self.q.shape
        k, v = self.kv(images).view(R, n, 2, heads, D).permute(2, 0, 3, 1, 4)
        q = self.q.transpose(0, 1).expand(R, heads, num_q, D)
        o = attention(q, k, v, real[:, None].expand(R, num_q, n))
        return self.out(o.transpose(1, 2).flatten(2))


class ViSpecDrafter(EagleDrafter):
    """Vision-aware drafting (Kang et al. 2025, arXiv 2509.15235, §3, and its code).

    The memory has num_q − 1 rows per image, at the positions of its last tokens, and none of its target features.
    The global vector g of the last image before a row is concatenated with the target's feature there, and `img_fc`
    merges both: f' = img_fc([h; g]), g = 0 before the first image. The term of g, W_g·g + b, is the same for all rows
    after an image, so it is computed once and passed as their context.
    """

    method = "vispec"
    Config = ViSpecConfig
    config: ViSpecConfig
    sees = True

    def __init__(self, config: ViSpecConfig) -> None:
        super().__init__(config)
        H = config.hidden
        self.adaptor = Adaptor(config)
        self.img_fc = Linear(2 * H, H)
        with torch.no_grad():  # starts as the identity on the feature, so that text is drafted as without the images
            self.img_fc.weight.copy_(torch.eye(H, 2 * H))
            self.img_fc.bias.zero_()

    def inputs(self, embeds: Tensor, features: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        added = self.img_fc.bias if context is None else context
        return super().inputs(embeds, linear(features, self.img_fc.weight[:, : self.config.hidden]) + added)

    def encode_prompt(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        c, (B, L, H) = self.config, embeds.shape
        spans = runs(visual * valid, merge=c.media == "merge")
        count = c.num_q - 1 if c.summaries else 0
        vectors = self.adaptor(*spans_of(self.embed_norm(embeds), spans)) if spans else embeds.new_zeros(0, c.num_q, H)
        contexts = self._added(vectors[:, -1])
        latest = torch.zeros(B, L + 1, dtype=torch.long, device=embeds.device)  # the context at each row and after all
        for image, (b, _, stop) in enumerate(spans, 1):
            latest[b, stop:] = image
        index, real, source = splice(valid, spans, [count] * len(spans))
        own = source.clamp(min=0)
        context = contexts[gather_rows(latest, own)]
        _, residual = self.inputs(gather_rows(embeds, own), gather_rows(features, own), context)
        residual = residual.masked_scatter((real & (source < 0))[..., None], vectors[:, :count].to(residual))
        ends = positions[[b for b, *_ in spans], [stop - 1 for *_, stop in spans]]
        ends = ends[:, None] + torch.arange(1 - count, 1, device=ends.device)  # [R, num_q − 1]
        places = spliced(positions, ends.flatten(), index)
        x, onward = self.input_norm(residual), contexts[latest[:, L:]]
        return EncodedPrompt(x, residual, places, real, source, context, onward)

    def _added(self, seen: Tensor) -> Tensor:
        """The term of g [R, H] in img_fc: before the first image, then after each of the R images; [1 + R, H]."""
        seen = seen if self.config.global_vector else torch.zeros_like(seen)
        return linear(F.pad(seen, (0, 0, 1, 0)), self.img_fc.weight[:, self.config.hidden :], self.img_fc.bias)
