"""Janus: stock's `generate` has a separate loop for images; here it is interrupted where that loop would begin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    LogitsProcessorList,
)

from mmspec.pipelines.host.call import calling, picture
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import Cache, GenerationConfig, GenerativeModel, Mask
from mmspec.pipelines.host.names import CACHE, FEATURES
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import POINTWISE


@dataclass(eq=False)
class Prepared(Exception):
    """Carries the prepared arguments out of stock's `generate`, from the point where its loop would begin."""

    ids: Tensor  # [2B, L], the prompts, then the same with padding instead of words
    embeds: Tensor  # [2B, L, H]
    arguments: dict[str, Any]  # of `prepare_inputs_for_generation`
    processors: LogitsProcessorList
    config: GenerationConfig

    @property
    def owns_cache(self) -> bool:
        """Whether the caller passed a cache."""
        return self.arguments.get(CACHE) is not None

    @property
    def split(self) -> tuple[Guidance, LogitsProcessorList]:
        """Guidance, which includes the processors before it, and the processors after it."""
        at = [type(p) is ClassifierFreeGuidanceLogitsProcessor for p in self.processors].index(True)
        scale, before = self.processors[at].guidance_scale, tuple(self.processors[:at])
        return Guidance(scale, widen=False, before=before), LogitsProcessorList(self.processors[at + 1 :])

    @property
    def guided(self) -> bool:
        return any(type(p) is ClassifierFreeGuidanceLogitsProcessor for p in self.processors)

    @property
    def unsupported(self) -> list[str]:
        """Classes of processors that read the prompt, or may keep state."""
        supported = POINTWISE | {ClassifierFreeGuidanceLogitsProcessor}
        return [type(p).__name__ for p in self.processors if type(p) not in supported]


@dataclass
class Preparation:
    """What stock has prepared so far for a call that generates images."""

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    config: GenerationConfig = field(default_factory=GenerationConfig)


def stock_generate(model: object, *args: Any, **kwargs: object) -> object:
    return stock(model).generate(model, *own(*args), **kwargs)


def own(
    inputs: Tensor | None, attention_mask: Tensor | None, logits_processor: Iterable[LogitsProcessor] | None
) -> tuple[Tensor | None, Tensor | None, LogitsProcessorList]:
    """The same arguments with a copy of the list of processors, since stock's `generate` appends to the list."""
    return inputs, attention_mask, LogitsProcessorList(logits_processor or ())


def prepared(model: object, *args: object, **kwargs: object) -> object:
    """Stock's arguments for an image loop, as Prepared; or stock's result, if the model was disabled meanwhile."""
    with calling(picture=Preparation()):
        try:
            return stock_generate(model, *args, **kwargs)  # or raises an error for a wrong argument
        except Prepared as ready:
            return ready.with_traceback(None)  # the traceback would keep all of stock's tensors alive


class UpToTheLoop:
    """Mixin for a Janus model."""

    def _get_logits_processor(self, *args: object, **kwargs: Any) -> LogitsProcessorList:
        processors = stock(self)._get_logits_processor(self, *args, **kwargs)
        if (call := picture(Preparation)) is not None:
            call.processors, call.config = processors, kwargs["generation_config"]
        return processors

    def _prepare_static_cache(self, *args: object, **kwargs: object) -> object:
        """Returns no cache during preparation, where it is not needed; some versions cannot even create it."""
        if picture(Preparation) is not None:
            return None
        return stock(self)._prepare_static_cache(self, *args, **kwargs)

    def prepare_inputs_for_generation(self, *args: object, **kwargs: Any) -> object:
        if (call := picture(Preparation)) is None:
            return stock(self).prepare_inputs_for_generation(self, *args, **kwargs)
        ids, embeds = kwargs.pop("input_ids"), kwargs.pop("inputs_embeds")
        raise Prepared(ids, embeds, kwargs, call.processors, call.config)


def prefill(model: GenerativeModel, ids: Tensor, embeds: Tensor, arguments: dict[str, Any], slots: Cache) -> Tensor:
    """Run stock's first forward, into this cache; returns the features [2B, L, H] of its language model."""
    arguments = arguments | {CACHE: slots}
    inputs = model.prepare_inputs_for_generation(input_ids=ids, inputs_embeds=embeds, **arguments)
    return model.model.language_model(**inputs)[FEATURES]


def step(model: GenerativeModel, embeds: Tensor, places: Tensor, mask: Mask, slots: Cache) -> Tensor:
    """Run one forward of the language model; returns its features [2B, N, H]."""
    return model.model.language_model(
        inputs_embeds=embeds, position_ids=places, attention_mask=mask, **{CACHE: slots}, use_cache=True
    )[FEATURES]


def grid(model: GenerativeModel) -> tuple[int, int]:
    """Rows and columns of an image in tokens."""
    rows, columns = model.model.vqmodel.quantize.quant_state_dims
    return rows, columns


def tokens(model: GenerativeModel) -> int:
    """The number of tokens of an image."""
    return int(model.model.vision_model.config.num_image_tokens)


def codes(model: GenerativeModel) -> int:
    """The size of the codebook."""
    return int(model.model.vqmodel.config.num_embeddings)


def codebook(model: GenerativeModel) -> Tensor:
    """The codes in the form that the image decoder reads, [V, c]."""
    return torch.nn.functional.normalize(model.model.vqmodel.quantize.embedding.weight.detach(), dim=-1)


def head(model: GenerativeModel, hidden: Tensor) -> Tensor:
    return model.model.generation_head(hidden)
