"""Classifier-free guidance: two forwards of the same tokens, with the prompt and without it, make one distribution."""

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
    """u + scale·(c − u), where c is said with the prompt and u without it."""

    scale: float  # how far to go
    of: str = "logits"  # "logits", or "log-probabilities", as transformers' processor for negative prompts has it
    tokens: int | None = None  # guide the first so many new tokens only; None: all
    widen: bool = True  # reckon in float32, and not in the model's own precision
    before: tuple[LogitsProcessor, ...] = ()  # processors that both streams go through first, as in stock

    def __call__(self, raw: Tensor, position: Tensor) -> Tensor:
        """Guided logits [B, n, V].

        Args:
            raw: [B·2, n, V], of the conditional stream and of the unconditional one of each row.
            position: [B, n], number of the new token that the logits are for.
        """
        for processor in self.before:  # of one position's scores alone
            raw = processor(torch.zeros(1, 1, dtype=torch.long, device=raw.device), raw.flatten(0, 1)).view_as(raw)
        c, u = (raw.to(torch.float32) if self.widen else raw).unflatten(0, (-1, 2)).unbind(1)
        if self.of == "log-probabilities":  # stock widens the conditional stream alone
            c, u = c.to(torch.float32).log_softmax(-1), u.log_softmax(-1)
        guided = u + self.scale * (c - u)
        return guided if self.tokens is None else torch.where((position < self.tokens)[..., None], guided, c)


@dataclass(frozen=True)
class NegativePrompt:
    """What stands in the prompt's place in the second stream: ids and attention mask, [B, L]."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, prompt: Tensor) -> NegativePrompt:
        """From the stock processor; without a negative prompt it takes the prompt's last token."""
        context: dict[str, Any] = processor.unconditional_context
        ids, mask = context["input_ids"], context["attention_mask"]
        ids = prompt[:, -1:] if ids is None else ids.to(prompt.device)
        mask = torch.ones_like(ids) if mask is None else mask.to(prompt.device)
        copies = len(prompt) // len(ids)  # num_return_sequences expands the prompt alone
        return cls(ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0))


def stands_for(processor: object, model: object) -> bool:
    """Whether a second stream can replace this processor: the stock one, unused yet, on the same model."""
    return _is_guidance(processor) and processor.model is model and bool(processor.unconditional_context["first_pass"])


def split(
    processors: LogitsProcessorList, prompt: Tensor
) -> tuple[Guidance | None, NegativePrompt | None, LogitsProcessorList]:
    """The guidance taken out of a list of processors, its negative prompt, and the processors that remain."""
    rest = LogitsProcessorList(p for p in processors if not _is_guidance(p))
    guide = next(filter(_is_guidance, processors), None)
    if guide is None:
        return None, None, rest
    return Guidance(guide.guidance_scale, of="log-probabilities", widen=False), NegativePrompt.of(guide, prompt), rest


def _is_guidance(processor: object) -> TypeGuard[UnbatchedClassifierFreeGuidanceLogitsProcessor]:
    return type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor
