"""The methods that `generate` ends in, overridden on an enabled model: a call in our words, or stock's own loop."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin

from mmspec.pipelines.host.call import Call, current
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.names import bound

like_generate = functools.wraps(GenerationMixin.generate)


def reached() -> None:
    """The call under way has come to a loop of ours."""
    if (now := current.get()) is not None:
        now.reached = True


class Loops:
    """Mixin of an enabled model; `generate` lands in one of these for every mode that transformers has.

    Another thread may swap the class at any time, so methods take the stock ones from `stock(self)`.
    """

    def _mmspec_run(self, call: Call) -> tuple[Any, ...]:
        """What the call returns, alone in a tuple; (): stock has to run it."""
        return ()

    def _mmspec_leave(self, beams: bool) -> None:
        """Say why a call with beams, or one that drafts by itself, runs in stock's loop."""

    def _mmspec_keeps(self) -> bool:
        """Whether prompts are kept, so that pictures may wait for the prefill, which may have read them before."""
        return False

    def _maybe_prepare_encoder_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Not for prompts that are never kept, nor for stock's prefill in pieces, which does not take pictures."""
        prepare = stock(self)._maybe_prepare_encoder_kwargs_for_generation
        if self._mmspec_keeps() and not self.config.is_encoder_decoder:  # type: ignore[attr-defined]
            told = bound(prepare, *args, **kwargs)
            config = told["generation_config"]
            one = max(config.num_beams or 1, config.num_return_sequences or 1) == 1
            if one and told["model_input_name"] != "inputs_embeds" and config.prefill_chunk_size is None:
                return told["model_kwargs"]
        return prepare(self, *args, **kwargs)

    def _sample(
        self,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        reached()
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if found := self._mmspec_run(Call(*given, synced_gpus, streamer, model_kwargs)):
            return found[0]
        return stock(self)._sample(self, *given, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        reached()
        self._mmspec_leave(beams=True)
        return stock(self)._beam_search(self, *args, **kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        reached()
        self._mmspec_leave(beams=False)
        return stock(self)._assisted_decoding(self, *args, **kwargs)


def as_call(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    tokenizer: Any = None, **arguments: Any,
) -> Call:  # fmt: skip
    """As `custom_generate`: what `generate` hands to its loop. That it asks for `tokenizer` keeps `stop_strings`
    working."""
    return Call(input_ids, logits_processor, stopping_criteria, generation_config, arguments=arguments)
