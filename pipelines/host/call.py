"""The arguments of one call of `generate`, as stock passes them to its decoding loop."""

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

from mmspec.pipelines.host import devices
from mmspec.pipelines.host.kinds import Cache, GenerativeModel
from mmspec.pipelines.host.names import CACHE, LOGITS
from mmspec.pipelines.host.processors import guidance as guided
from mmspec.pipelines.host.processors.guidance import Guidance, NegativePrompt
from mmspec.pipelines.host.processors.stopping import Endings
from mmspec.types import Round

T = TypeVar("T")
Steps = tuple[Tensor, ...]  # one [B, V] for each token

# arguments with an entry for each token; generated tokens have the entry of the prompt's last one
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "cross_attention_mask", "image_attention_mask")
BOTH_WAYS = (*TYPES, "block_sequence_ids")  # arguments that may make a decoder's attention bidirectional
ENCODED = "mm_encoder_outputs"  # the outputs of encoders that ran before the prefill
ONCE = (LOGITS, "use_cache")  # arguments that do not change what a forward computes for a token
# arguments that only the prefill reads
PICTURES = {
    *("image_pixel_values", "flattened_patches", "audio_input_features", "audio_embed_sizes", "audio_attention_mask"),
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
}


@dataclass
class Custom:
    """A running `custom_generate`."""

    cache: object  # its cache argument, which it may read after a call has filled it
    called: bool = False  # whether it has called a decoding loop


@dataclass
class Current:
    """The context of a running call of `generate` on an enabled model."""

    given: dict[str, Any] = field(default_factory=dict)  # the user's arguments, by name
    patch: Any = None  # of the model, or of the drafter that the call names
    custom: Custom | None = None  # the `custom_generate` that runs, or that the call runs in
    reached: bool = False  # whether stock has called a loop of ours
    watch: Callable[[Round], None] | None = None  # is called with every round
    picture: object = None  # if the call generates an image in a mode of the model's own: its family's data on it


current: ContextVar[Current | None] = ContextVar("mmspec_current", default=None)


@contextmanager
def calling(**changes: Any) -> Iterator[Current]:
    """A context in which `current` has these values, and the others of the surrounding call."""
    around = current.get()
    if around is not None and around.reached:  # a call from inside another call's loop, which is not watched
        around = replace(around, watch=None)
    token = current.set(now := Current(**changes) if around is None else replace(around, **changes))
    try:
        yield now
    finally:
        current.reset(token)


def picture(kind: type[T]) -> T | None:
    """The family's data on the image that the current call generates, if it is of this class."""
    now = current.get()
    return now.picture if now is not None and isinstance(now.picture, kind) else None


@dataclass
class Call:
    """The arguments that `generate` passes to `_sample`."""

    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: Any  # a GenerationConfig, with the private attributes that stock adds
    synced_gpus: bool = False
    streamer: BaseStreamer | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=lambda: now.given if (now := current.get()) else {})  # see Current
    begun: bool = False  # whether any part of the answer was streamed, so that stock can no longer take over

    def __post_init__(self) -> None:
        if (now := current.get()) is not None and now.custom is not None:
            now.custom.called = True

    @cached_property
    def _split(self) -> tuple[Guidance | None, NegativePrompt | None, LogitsProcessorList]:
        return guided.split(self.logits_processor, self.input_ids)

    @property
    def guidance(self) -> Guidance | None:
        """Combines two streams into one distribution; None: there is one stream."""
        return self._split[0]

    @property
    def negative(self) -> NegativePrompt | None:
        """What the second stream reads instead of the prompt."""
        return self._split[1]

    @property
    def processors(self) -> LogitsProcessorList:
        """The call's logits processors, without guidance."""
        return self._split[2]

    @cached_property
    def endings(self) -> Endings:
        return Endings(self.stopping_criteria, len(self.input_ids), self.input_ids.device)

    @property
    def cache(self) -> Cache | None:
        """The call's cache: the caller's own, or an empty one that `generate` created."""
        return self.arguments.get(CACHE)

    @property
    def filled(self) -> bool:
        """Whether the cache already has tokens, for example in the second turn of a conversation."""
        return self.cache is not None and int(self.cache.get_seq_length()) > 0

    @property
    def pieces(self) -> int | None:
        """The number of tokens that stock's prefill reads at once; None: all of them."""
        return self.generation_config.prefill_chunk_size

    @cached_property
    def pad(self) -> int:  # read from the device once, not for every column
        """The token that fills rows that have ended."""
        pad = self.generation_config._pad_token_tensor
        return int(pad) if pad is not None else 0

    def unread(self, past: int) -> int:
        """How many tokens stock's `_prefill` reads if `past` are already cached."""
        embeds, mask = self.arguments.get("inputs_embeds"), self.arguments.get("attention_mask")
        L = self.input_ids.shape[1]
        if embeds is not None:
            return int(embeds.shape[1]) - past
        whole = getattr(self.generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        return len(range(L)[-(L - past) :]) if whole == L else L  # if the mask is longer, all ids are new

    @property
    def scored(self) -> bool:
        """Whether the processed scores of each step are collected."""
        return self.collects("output_scores")

    def collects(self, option: str) -> bool:
        """Whether an output option is in effect; stock ignores these unless it returns a dict."""
        return bool(self.generation_config.return_dict_in_generate and getattr(self.generation_config, option))

    @property
    def owned(self) -> bool:
        """Whether the cache is the caller's own, or a `custom_generate` has it."""
        now = current.get()
        if now is not None and now.custom is not None and now.custom.cache is self.cache:
            return True
        return bool(getattr(self.cache, "_is_user_defined", False))

    @property
    def returns_cache(self) -> bool:
        """Whether the caller may read the cache afterwards."""
        return bool(self.generation_config.return_dict_in_generate or self.filled or self.owned)

    def for_model(self, model: GenerativeModel) -> Call:
        """The same call with int64 ids, and with all inputs of a forward on the device of the model's embedding.

        Nothing is moved to the CPU, since a model there may be moved to another device by its forward.
        """
        ids, device = self.input_ids, devices.execution(model.get_input_embeddings())
        ids = ids if ids.is_floating_point() else ids.long()  # stock's embedding raises an error for floats
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
    """What `generate` returns if it returns a dict; `scores` and `logits` have one [B, V] for each step."""
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE: cache})  # type: ignore[arg-type]
