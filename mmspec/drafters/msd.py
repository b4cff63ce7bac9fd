"""MSD: an EAGLE drafter that reads image tokens as their embeddings, without the target's features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.layer import EncodedPrompt


@dataclass(frozen=True)
class MsdConfig(EagleConfig):
    """An EagleConfig with EAGLE-1/2's layer. Published: all flags off for LLaVA; input_norm, qkv_bias for Qwen2-VL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only_final("MSD")


class MsdDrafter(EagleDrafter):
    """Visual rows bypass `fc` (Lin et al. 2025, arXiv 2505.14260, §3, and its code).

    A row whose next token is visual reads only that token's embedding, not the target's feature. Every row of the
    prompt is kept, so the drafter's cache is as long as the target's.
    """

    method = "msd"
    Config = MsdConfig
    sees = True

    def encode_prompt(
        self, embeds: Tensor, features: Tensor, visual: Tensor, valid: Tensor, positions: Tensor
    ) -> EncodedPrompt:
        whole = super().encode_prompt(embeds, features, visual, valid, positions)
        residual = torch.where((visual > 0)[..., None], self.embed_norm(embeds), whole.residual)
        return EncodedPrompt(self.input_norm(residual), residual, positions, valid, whole.source)
