"""Janus: pictures have a loop of their own in stock's `generate`; here it stops where that loop would begin."""

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
    """Carries what stock's `generate` made of its arguments out of it, at the point where its loop would begin."""

    ids: Tensor  # [2B, L], the prompts, then the same with pads for words
    embeds: Tensor  # [2B, L, H]
    arguments: dict[str, Any]  # of `prepare_inputs_for_generation`
    processors: LogitsProcessorList
    config: GenerationConfig

    @property
    def owns_cache(self) -> bool:
        """Whether the call came with a cache of the caller's own."""
        return self.arguments.get(CACHE) is not None

    @property
    def split(self) -> tuple[Guidance, LogitsProcessorList]:
        """Guidance, with the processors before it, and those behind it."""
        at = [type(p) is ClassifierFreeGuidanceLogitsProcessor for p in self.processors].index(True)
        scale, before = self.processors[at].guidance_scale, tuple(self.processors[:at])
        return Guidance(scale, widen=False, before=before), LogitsProcessorList(self.processors[at + 1 :])

    @property
    def guided(self) -> bool:
        return any(type(p) is ClassifierFreeGuidanceLogitsProcessor for p in self.processors)

    @property
    def strange(self) -> list[str]:
        """Classes of processors that read the prompt, or may keep state."""
        known = POINTWISE | {ClassifierFreeGuidanceLogitsProcessor}
        return [type(p).__name__ for p in self.processors if type(p) not in known]


@dataclass
class Preparation:
    """What stock has made so far of the arguments of a call for pictures."""

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    config: GenerationConfig = field(default_factory=GenerationConfig)


def stock_generate(model: object, *given: Any, **kwargs: object) -> object:
    return stock(model).generate(model, *own(*given), **kwargs)


def own(
    inputs: Tensor | None, attention_mask: Tensor | None, logits_processor: Iterable[LogitsProcessor] | None
) -> tuple[Tensor | None, Tensor | None, LogitsProcessorList]:
    """These arguments of stock's `generate`, which adds to the list of processors that it is given."""
    return inputs, attention_mask, LogitsProcessorList(logits_processor or ())


def prepared(model: object, *args: object, **kwargs: object) -> object:
    """What stock makes of the arguments of a call for pictures, Prepared; or what it returns, disabled since."""
    with calling(picture=Preparation()):
        try:
            return stock_generate(model, *args, **kwargs)  # an argument that stock refuses
        except Prepared as ready:
            return ready.with_traceback(None)  # which would hold on to all of stock's tensors


class UpToTheLoop:
    """Mixin of a Janus model."""

    def _get_logits_processor(self, *args: object, **kwargs: Any) -> LogitsProcessorList:
        made = stock(self)._get_logits_processor(self, *args, **kwargs)
        if (call := picture(Preparation)) is not None:
            call.processors, call.config = made, kwargs["generation_config"]
        return made

    def _prepare_static_cache(self, *args: object, **kwargs: object) -> object:
        """No cache of stock's own while it prepares; some versions cannot even make theirs."""
        if picture(Preparation) is not None:
            return None
        return stock(self)._prepare_static_cache(self, *args, **kwargs)

    def prepare_inputs_for_generation(self, *args: object, **kwargs: Any) -> object:
        if (call := picture(Preparation)) is None:
            return stock(self).prepare_inputs_for_generation(self, *args, **kwargs)
        ids, embeds = kwargs.pop("input_ids"), kwargs.pop("inputs_embeds")
        raise Prepared(ids, embeds, kwargs, call.processors, call.config)


def prefill(model: GenerativeModel, ids: Tensor, embeds: Tensor, arguments: dict[str, Any], slots: Cache) -> Tensor:
    """Stock's first forward, into this cache: the features [2B, L, H] of its language model."""
    arguments = arguments | {CACHE: slots}
    given = model.prepare_inputs_for_generation(input_ids=ids, inputs_embeds=embeds, **arguments)
    return model.model.language_model(**given)[FEATURES]


def step(model: GenerativeModel, embeds: Tensor, places: Tensor, mask: Mask, slots: Cache) -> Tensor:
    """The features [2B, N, H] of one forward of the language model."""
    return model.model.language_model(
        inputs_embeds=embeds, position_ids=places, attention_mask=mask, **{CACHE: slots}, use_cache=True
    )[FEATURES]


def grid(model: GenerativeModel) -> tuple[int, int]:
    """Rows and columns of a picture."""
    rows, columns = model.model.vqmodel.quantize.quant_state_dims
    return rows, columns


def tokens(model: GenerativeModel) -> int:
    """Of a picture."""
    return int(model.model.vision_model.config.num_image_tokens)


def codes(model: GenerativeModel) -> int:
    """How many codes there are."""
    return int(model.model.vqmodel.config.num_embeddings)


def codebook(model: GenerativeModel) -> Tensor:
    """The codes as the decoder of pictures sees them, [V, c]."""
    return torch.nn.functional.normalize(model.model.vqmodel.quantize.embedding.weight.detach(), dim=-1)


def head(model: GenerativeModel, hidden: Tensor) -> Tensor:
    return model.model.generation_head(hidden)
