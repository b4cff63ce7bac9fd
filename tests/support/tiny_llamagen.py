"""Tiny random LlamaGen pipelines, by class and by text, with a real T5 encoder and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hostile_drafters
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

import mmspec
from mmspec.models.llamagen import LlamaGenTransformer
from mmspec.models.llamagen_vq import LlamaGenVQ
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.train.data import TrainingSample

TEXT = "a small large red blue striped plain circle square left right of on the grainy background"
SIZES = {"dim": 32, "num_layers": 2, "heads": 4, "kv_heads": 4, "vocab": 64, "grid": 4, "multiple_of": 16}
PREFIX, WIDTH, CLASSES = 12, 16, 10


def lively(module: nn.Module, seed: int, scale: float = 0.35) -> Any:
    """The module with weights large enough that every input matters to the output."""
    noise = torch.Generator().manual_seed(seed)
    for name, t in module.named_parameters():
        with torch.no_grad():
            if "norm" in name and t.dim() == 1:
                t.copy_(1 + 0.2 * torch.randn(t.shape, generator=noise))
            else:
                t.copy_(scale * torch.randn(t.shape, generator=noise))
    if hasattr(module, "cls_embedding") and hasattr(module.cls_embedding, "uncond_embedding"):
        module.cls_embedding.uncond_embedding.normal_(generator=noise)
    return module.eval()


def transformer(kind: str = "text", seed: int = 0, **sizes: Any) -> LlamaGenTransformer:
    text = {"prefix": PREFIX, "classes": 0, "caption_width": WIDTH}
    condition = {"text": text, "class": {"prefix": 1, "classes": CLASSES}}
    return lively(LlamaGenTransformer(**{**SIZES, **condition[kind], **sizes}), seed)


def vq(seed: int = 0, **sizes: Any) -> LlamaGenVQ:
    small = {"base": 32, "multipliers": (1, 1), "latent": 32, "codes": SIZES["vocab"], "code_dim": 4, "blocks": 1}
    return lively(LlamaGenVQ(**{**small, **sizes}), seed, 0.1)


def text_encoder(seed: int = 0, d_model: int = WIDTH) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(TEXT.split()) + 3, d_model=d_model, d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=0,
        eos_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    return lively(T5EncoderModel(config), seed)


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *TEXT.split()])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def saved(kind: str, folders: pytest.TempPathFactory, **sizes: Any) -> Path:
    """A folder for `from_pretrained` with such a pipeline."""
    folder = folders.mktemp(kind)
    pipeline(kind, **sizes).save_pretrained(folder)
    return folder


def pipeline(kind: str = "text", seed: int = 0, **sizes: Any) -> LlamaGenPipeline:
    """A quiet pipeline on the CPU in float32; `kind` is "text" or "class"."""
    parts = {"text_encoder": text_encoder(seed), "tokenizer": tokenizer()} if kind == "text" else {}
    pipe = LlamaGenPipeline(transformer(kind, seed, **sizes), vq(seed, codes=sizes.get("vocab", 64)), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def samples(count: int) -> list[TrainingSample]:
    """Prompts of a few known words, each another."""
    words = TEXT.split()
    texts = [" ".join(words[(i * k) % len(words)] for k in range(1, 3 + i % 4)) for i in range(1, count + 1)]
    return [TrainingSample(list, text) for text in texts]


def law_of_the_first_two_is_kept(n: int = 400) -> None:
    """First two tokens of many rows, of drafts that are drawn, against plain decoding with other seeds."""
    pipe = pipeline("class", vocab=hostile_drafters.VOCAB, grid=2)
    how = {"class_labels": 4, "top_k": 3, "output_type": "latent", "num_images_per_prompt": n}

    def pairs(seed: int) -> torch.Tensor:
        tokens = pipe(generator=torch.Generator().manual_seed(seed), **how).tokens.flatten(1)
        place = tokens[:, 0] * hostile_drafters.VOCAB + tokens[:, 1]
        return torch.bincount(place, minlength=hostile_drafters.VOCAB**2) / n

    plain, again = pairs(1), pairs(2)
    with mmspec.enable(pipe, hostile_drafters.Drawn(lambda row, g: ([0, 0], [0, 1])), reproducible=False):
        drafted = pairs(3)
    noise = (plain - again).abs().sum() / 2
    assert (drafted - (plain + again) / 2).abs().sum() / 2 < 2 * noise + 0.03
    assert (plain > 0).sum() > 3
