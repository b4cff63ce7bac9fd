"""Guidance by a negative prompt: transformers hides its forward in a logits processor; here it is a second stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmspec.pipelines.cache import SlotCache


@dataclass(frozen=True)
class NegativePrompt:
    """What `UnbatchedClassifierFreeGuidanceLogitsProcessor` does, with its second forward left to the target.

    Attributes:
        scale: s in u + s·(c − u), of log-probabilities.
        ids: the negative prompt, [B, L].
        mask: its attention mask, [B, L].
    """

    scale: float
    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, prompt: Tensor) -> NegativePrompt:
        """From the stock processor; without a negative prompt it takes the prompt's last token."""
        told = processor.unconditional_context
        ids = prompt[:, -1:] if told["input_ids"] is None else told["input_ids"].to(prompt.device)
        mask = torch.ones_like(ids) if told["attention_mask"] is None else told["attention_mask"].to(prompt.device)
        copies = len(prompt) // len(ids)  # num_return_sequences expands the prompt alone
        return cls(processor.guidance_scale, ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0))

    def prefill(self, model: Any, reserve: int) -> tuple[SlotCache, Any]:
        """The negative prompt's own cache, and what the model returned for it."""
        cache = SlotCache(len(self.ids), self.ids.device, reserve)
        out = model(self.ids, attention_mask=self.mask, use_cache=True, past_key_values=cache, return_dict=True)
        cache.advance(self.ids.shape[1])
        return cache, out

    def __call__(self, raw: Tensor) -> Tensor:
        """Guided logits [B, N, V] from those of both streams, [2B, N, V]."""
        cond, uncond = raw.chunk(2)
        c, u = cond.to(torch.float32).log_softmax(-1), uncond.log_softmax(-1)
        return self.scale * (c - u) + u


def stands_for(processor: Any, model: Any) -> bool:
    """Whether NegativePrompt can replace this processor: the stock one, unused yet, on the same model."""
    return _is_guidance(processor) and processor.model is model and processor.unconditional_context["first_pass"]


def split(processors: LogitsProcessorList, prompt: Tensor) -> tuple[NegativePrompt | None, LogitsProcessorList]:
    """The guidance taken out of a list of processors, and the processors that remain."""
    rest = LogitsProcessorList(p for p in processors if not _is_guidance(p))
    found = next((NegativePrompt.of(p, prompt) for p in processors if _is_guidance(p)), None)
    return found, rest


def _is_guidance(processor: Any) -> bool:
    return type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor
