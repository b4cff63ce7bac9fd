"""Prepares prompts for LlamaGen: captions are cleaned as in training, and their T5 features left-padded."""

from __future__ import annotations

import warnings

import torch
from diffusers.utils import is_bs4_available, is_ftfy_available
from torch import Tensor

from mmspec.pipelines.host.loading import PreTrainedTokenizerFast, T5EncoderModel


def cleaned(texts: list[str]) -> list[str]:
    """Clean captions twice, as DeepFloyd does; without the two libraries for that, only lower-case them."""
    if not (is_ftfy_available() and is_bs4_available()):
        warnings.warn(
            "prompts are only lower-cased, not cleaned as in training, which changes LlamaGen's pictures for unusual "
            "ones; pip install ftfy beautifulsoup4, or pass clean_caption=False",
            stacklevel=2,
        )
        return lowered(texts)
    from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import PixArtAlphaPipeline

    cleaner = object.__new__(PixArtAlphaPipeline)  # the cleaning uses no attribute of the pipeline
    return cleaner._text_preprocessing(texts, clean_caption=True)


def lowered(texts: list[str]) -> list[str]:
    return [text.lower().strip() for text in texts]


def read(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, encoder: T5EncoderModel, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features [B, length, width] of texts, left-padded with zeros, and which are valid, bool [B, length].

    Raises:
        ValueError: a text of more than `length` tokens.
    """
    tokenized = tokenizer(texts, padding="max_length", max_length=length, padding_side="right")
    longest, worst = max(zip(tokenized.input_ids, texts, strict=True), key=lambda one: len(one[0]))
    if len(longest) > length:
        raise ValueError(
            f"the prompt {worst[:60]!r} has {len(longest)} tokens with the end token; this model reads at most "
            f"{length}, so shorten it"
        )
    ids, mask = (torch.tensor(tokenized[name], device=device) for name in ("input_ids", "attention_mask"))
    features = encoder(ids, attention_mask=mask)[0] * mask[..., None]
    place = (torch.arange(length, device=device) + mask.sum(1, keepdim=True)) % length  # right to left padding
    return features.gather(1, place[..., None].expand_as(features)), mask.bool().gather(1, place)
