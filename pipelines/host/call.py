"""The arguments of one call of `generate`, as stock hands them to its loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, GenerateDecoderOnlyOutput

from mmspec.pipelines.host.kinds import Cache, GenerativeModel
from mmspec.pipelines.host.names import CACHE, LOGITS
from mmspec.pipelines.host.processors import guidance as guided
from mmspec.pipelines.host.processors.guidance import Guidance, NegativePrompt
from mmspec.pipelines.host.processors.stopping import Endings
from mmspec.types import Round

T = TypeVar("T")
Steps = tuple[Tensor, ...]  # one [B, V] for each token

# what a call tells of each token, of which generated ones have the last one's
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "cross_attention_mask", "image_attention_mask")
BOTH_WAYS = (*TYPES, "block_sequence_ids")  # what may make a decoder read in both directions
ENCODED = "mm_encoder_outputs"  # what became of pictures that were encoded before the prefill
ONCE = (LOGITS, "use_cache")  # what does not change what a forward computes of a token
# what a prefill alone reads
PICTURES = (
    *("image_pixel_values", "flattened_patches", "audio_input_features", "audio_embed_sizes", "audio_attention_mask"),
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
)


@dataclass
class Custom:
    """A `custom_generate` under way."""

    cache: object  # that it was given: it may look at it once a call has filled it
    called: bool = False  # whether it has made any call


@dataclass
class Current:
    """A call of `generate` under way on an enabled model, and what those around it know of it."""

    given: dict[str, Any] = field(default_factory=dict)  # what the user gave it, by name
    patch: Any = None  # of the model, or of the drafter that the call names
    custom: Custom | None = None  # of a `custom_generate`, or of one around it
    reached: bool = False  # whether stock has handed over to a loop of ours
    watch: Callable[[Round], None] | None = None  # is given every round
    picture: object = None  # where the call is to draw one in a mode of the model's own: what its family has to know


current: ContextVar[Current | None] = ContextVar("mmspec_current", default=None)


@contextmanager
def calling(**known: Any) -> Iterator[Current]:
    """Within, this is known of the call under way, beside what was known before."""
    around = current.get()
    if around is not None and around.reached:  # by what the loop of another call asks: nobody watches this one
        around = replace(around, watch=None)
    token = current.set(now := Current(**known) if around is None else replace(around, **known))
    try:
        yield now
    finally:
        current.reset(token)


def picture(kind: type[T]) -> T | None:
    """What a family knows of the picture that the call is to draw, where it is of this kind."""
    now = current.get()
    return now.picture if now is not None and isinstance(now.picture, kind) else None


@dataclass
class Call:
    """The arguments that `generate` hands to `_sample`."""

    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: Any  # a GenerationConfig, with what stock adds to it on the way
    synced_gpus: bool = False
    streamer: BaseStreamer | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=lambda: now.given if (now := current.get()) else {})  # see Current
    begun: bool = False  # whether anything of the answer has left: then there is no way back to stock

    def __post_init__(self) -> None:
        if (now := current.get()) is not None and now.custom is not None:
            now.custom.called = True

    @cached_property
    def _split(self) -> tuple[Guidance | None, NegativePrompt | None, LogitsProcessorList]:
        return guided.split(self.logits_processor, self.input_ids)

    @property
    def guidance(self) -> Guidance | None:
        """What makes one distribution of two streams; None: there is one stream."""
        return self._split[0]

    @property
    def negative(self) -> NegativePrompt | None:
        """What the second stream reads in the place of the prompt."""
        return self._split[1]

    @property
    def processors(self) -> LogitsProcessorList:
        """What the call does to logits, guidance left out."""
        return self._split[2]

    @cached_property
    def endings(self) -> Endings:
        return Endings(self.stopping_criteria, len(self.input_ids), self.input_ids.device)

    @property
    def cache(self) -> Cache | None:
        """The cache that came with the call: the caller's own, or an empty one that `generate` made."""
        return self.arguments.get(CACHE)

    @property
    def filled(self) -> bool:
        """Whether it already holds something, as in a second turn of a conversation."""
        return self.cache is not None and int(self.cache.get_seq_length()) > 0

    @property
    def pieces(self) -> int | None:
        """Tokens that stock's prefill reads at once; None: all of them."""
        return self.generation_config.prefill_chunk_size

    @cached_property
    def pad(self) -> int:  # read from the device once, not for every column
        """What fills rows that have ended."""
        pad = self.generation_config._pad_token_tensor
        return int(pad) if pad is not None else 0

    def unread(self, past: int) -> int:
        """How many tokens stock's `_prefill` reads, where `past` are cached already."""
        embeds, mask = self.arguments.get("inputs_embeds"), self.arguments.get("attention_mask")
        L = self.input_ids.shape[1]
        if embeds is not None:
            return int(embeds.shape[1]) - past
        whole = getattr(self.generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        return len(range(L)[-(L - past) :]) if whole == L else L  # a mask that is longer tells that only new ids came

    @property
    def scored(self) -> bool:
        """Whether the processed scores of each step are collected."""
        return self.collects("output_scores")

    def collects(self, what: str) -> bool:
        """Whether something is collected of each step; stock leaves it out where it does not return a dict."""
        return bool(self.generation_config.return_dict_in_generate and getattr(self.generation_config, what))

    @property
    def owned(self) -> bool:
        """Whether it is the caller's own, or seen by a `custom_generate`."""
        now = current.get()
        if now is not None and now.custom is not None and now.custom.cache is self.cache:
            return True
        return bool(getattr(self.cache, "_is_user_defined", False))

    @property
    def returns_cache(self) -> bool:
        """Whether anybody may look at it afterwards."""
        return bool(self.generation_config.return_dict_in_generate or self.filled or self.owned)

    def for_model(self, model: GenerativeModel) -> Call:
        """The same call with int64 ids, and with all that a forward reads on the model's device, where stock moves it.

        A model that lies on the CPU may be one that moves at its forward, so it draws nothing there.
        """
        ids, device = self.input_ids, model.device
        ids = ids if ids.is_floating_point() else ids.long()  # numbers that are no ids stock's embedding refuses
        if device.type in ("cpu", "meta") or device == ids.device:
            return replace(self, input_ids=ids)

        moved = partial(tree_map_only, Tensor, lambda t: t.to(device))
        processors = [copy.copy(processor) for processor in self.logits_processor]
        for processor in processors:
            vars(processor).update(moved(vars(processor)))
        cache = {} if self.cache is None else {CACHE: self.cache}
        others = {name: value for name, value in self.arguments.items() if name not in cache}
        arguments = {**moved(others), **cache}
        return replace(
            self, input_ids=ids.to(device), logits_processor=LogitsProcessorList(processors), arguments=arguments
        )


def output(
    sequences: Tensor, cache: Cache | None = None, scores: Steps | None = None, logits: Steps | None = None
) -> GenerateDecoderOnlyOutput:
    """What `generate` returns where it returns a dict; `scores` and `logits`, [B, V] of each step."""
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE: cache})  # type: ignore[arg-type]
