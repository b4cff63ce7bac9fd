"""Scores how well images match their prompts, by any CLIP of transformers, including those trained on preferences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoProcessor

BATCH = 32


class ClipScorer:
    """CLIP score (Hessel et al. 2021, arXiv 2104.08718) as libraries report it: 100 · max(cos, 0).

    Args:
        where: a folder or a name on the Hub. HPSv2 and PickScore are also CLIPs, and loaded in the same way.

    Raises:
        OSError, ValueError: there is no such model, its processor is missing, or it does not embed texts and images.
    """

    def __init__(self, where: str, device: torch.device) -> None:
        model = type(AutoConfig.from_pretrained(where)).__name__.removesuffix("Config")
        self.model = AutoModel.from_pretrained(where, dtype=torch.float32).to(device).eval()
        if not hasattr(self.model, "get_text_features") or not hasattr(self.model, "get_image_features"):
            raise ValueError(f"a {model} does not embed texts and pictures in one space; choose a CLIP or SigLIP")
        self.processor = AutoProcessor.from_pretrained(where)
        if not hasattr(self.processor, "image_processor"):
            raise ValueError(
                "its processor takes no pictures; save one beside it, for a CLIP that of openai/clip-vit-base-patch32"
            )

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[object], texts: Sequence[str]) -> Tensor:
        """Scores [n] of images and their texts, in float64; texts that are too long for the model are truncated."""
        cosines = []
        for start in range(0, len(pictures), BATCH):
            some = slice(start, start + BATCH)
            inputs = self.processor(
                text=list(texts[some]), images=list(pictures[some]), return_tensors="pt", padding="max_length",
                truncation=True, max_length=self.model.config.text_config.max_position_embeddings,
            )  # fmt: skip
            out = self.model(**inputs.to(self.model.device))
            cosines.append(torch.cosine_similarity(out.image_embeds, out.text_embeds).double().cpu())
        return 100 * torch.cat(cosines).clamp_min(0)
