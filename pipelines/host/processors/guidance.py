"""Classifier-free guidance: combines two forwards of the same tokens, with and without the prompt, into one p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


@dataclass(frozen=True)
class Guidance:
    """u + scale·(c − u), where c has the prompt and u does not."""

    scale: float  # the guidance scale
    of: str = "logits"  # "logits", or "log-probabilities", as in transformers' processor for negative prompts
    tokens: int | None = None  # the number of new tokens that are guided; None: all
    widen: bool = True  # compute in float32, not in the model's precision
    before: tuple[LogitsProcessor, ...] = ()  # processors that are first applied to both streams, as in stock

    def __call__(self, raw: Tensor, position: Tensor) -> Tensor:
        """Guided logits [B, n, V].

        Args:
            raw: [B·2, n, V], for each row the conditional stream, then the unconditional one.
            position: [B, n], the index of the new token that the logits are for.
        """
        for processor in self.before:  # point-wise ones, which do not read the ids
            raw = processor(torch.zeros(1, 1, dtype=torch.long, device=raw.device), raw.flatten(0, 1)).view_as(raw)
        c, u = (raw.to(torch.float32) if self.widen else raw).unflatten(0, (-1, 2)).unbind(1)
        if self.of == "log-probabilities":  # stock widens only the conditional stream
            c, u = c.to(torch.float32).log_softmax(-1), u.log_softmax(-1)
        guided = u + self.scale * (c - u)
        return guided if self.tokens is None else torch.where((position < self.tokens)[..., None], guided, c)


@dataclass(frozen=True)
class NegativePrompt:
    """The prompt of the second stream: ids and attention mask, [B, L]."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, prompt: Tensor) -> NegativePrompt:
        """Read it from the stock processor, which uses the prompt's last token if there is no negative prompt."""
        context: dict[str, Any] = processor.unconditional_context
        ids, mask = context["input_ids"], context["attention_mask"]
        ids = prompt[:, -1:] if ids is None else ids.to(prompt.device)
        mask = torch.ones_like(ids) if mask is None else mask.to(prompt.device)
        copies = len(prompt) // len(ids)  # num_return_sequences expands only the prompt
        return cls(ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0))


def stands_for(processor: object, model: object) -> bool:
    """Whether a second stream can replace this processor: it is stock's, not used yet, and has the same model."""
    return _is_guidance(processor) and processor.model is model and bool(processor.unconditional_context["first_pass"])


def split(
    processors: LogitsProcessorList, prompt: Tensor
) -> tuple[Guidance | None, NegativePrompt | None, LogitsProcessorList]:
    """Split a list of processors into its guidance, the negative prompt of that, and the remaining processors."""
    rest = LogitsProcessorList(p for p in processors if not _is_guidance(p))
    guide = next(filter(_is_guidance, processors), None)
    if guide is None:
        return None, None, rest
    return Guidance(guide.guidance_scale, of="log-probabilities", widen=False), NegativePrompt.of(guide, prompt), rest


def _is_guidance(processor: object) -> TypeGuard[UnbatchedClassifierFreeGuidanceLogitsProcessor]:
    return type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor
