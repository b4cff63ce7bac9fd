"""Overrides the decoding loops that `generate` calls on an enabled model: runs a call in mmspec, or in stock's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from mmspec.config import UnsupportedError
from mmspec.pipelines.host.call import PICTURES, Call, current
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerationConfig, GenerativeModel
from mmspec.pipelines.host.names import bound

like_generate = functools.wraps(GenerationMixin.generate)


def loops(
    run: Callable[[Any, Call], tuple[object, ...]], leave: Callable[[Any, bool], None], keeps: Callable[[Any], bool],
    encoding: Callable[[Any], AbstractContextManager[object]],
) -> type:  # fmt: skip
    """A mixin for enabled models; `generate` calls one of its methods in every mode that transformers has.

    Another thread may swap a model's class at any time, so the arguments are functions of the model, and stock's
    methods are called through `stock(self)`.

    Args:
        run: runs a call, and returns its result in a tuple; (): stock has to run it.
        leave: declines a call, with beams (True) or stock's assisted generation (False), which stock's loop then runs.
        keeps: whether a model has a prefix cache, so that images are encoded in the prefill, and only if needed.
        encoding: a context in which stock encodes a model's images.
    """

    class Loops:
        def _maybe_prepare_encoder_kwargs_for_generation(self, *args: object, **kwargs: object) -> object:
            """Skip stock's encoding of images if the prefill encodes them: with a prefix cache, and not in pieces."""
            prepare = stock(self)._maybe_prepare_encoder_kwargs_for_generation
            arguments = bound(prepare, *args, **kwargs)
            if keeps(self) and not self.config.is_encoder_decoder:  # type: ignore[attr-defined]
                config = arguments["generation_config"]
                one = max(config.num_beams or 1, config.num_return_sequences or 1) == 1
                if one and arguments["model_input_name"] != "inputs_embeds" and config.prefill_chunk_size is None:
                    return arguments["model_kwargs"]
            with encoding(self) if PICTURES & arguments["model_kwargs"].keys() else nullcontext():
                return prepare(self, *args, **kwargs)

        def _sample(
            self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig, synced_gpus: bool = False, streamer: BaseStreamer | None = None,
            **model_kwargs: object,
        ) -> object:  # fmt: skip
            reached()
            given = (input_ids, logits_processor, stopping_criteria, generation_config)
            if answer := run(self, Call(*given, synced_gpus, streamer, model_kwargs)):
                return answer[0]
            return stock(self)._sample(self, *given, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)

        def _beam_search(self, *args: object, **kwargs: object) -> object:
            reached()
            leave(self, True)
            return stock(self)._beam_search(self, *args, **kwargs)

        def _assisted_decoding(self, *args: object, **kwargs: object) -> object:
            reached()
            leave(self, False)
            return stock(self)._assisted_decoding(self, *args, **kwargs)

    return Loops


def reached() -> None:
    """Note that the current call has reached one of our loops."""
    if (now := current.get()) is not None:
        now.reached = True


def as_call(
    model: GenerativeModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **arguments: object,
) -> Call:  # fmt: skip
    """For use as `custom_generate`: captures the arguments that `generate` passes to its loop, which have no tokenizer
    (see `at_strings`).

    Raises:
        UnsupportedError: the call generates an image in a mode of the model's own.
    """
    if (now := current.get()) is not None and now.picture is not None:
        raise UnsupportedError("pictures of this mode are not batched continuously; call model.generate for them")
    return Call(input_ids, logits_processor, stopping_criteria, generation_config, arguments=arguments)
