"""enable, disable, stats: mmspec on a loaded model or pipeline, and off again without a trace."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from mmspec.config import SpecConfig
from mmspec.pipelines import families
from mmspec.pipelines.generate import Call, generate, obstacle
from mmspec.pipelines.swap import restore, swap
from mmspec.pipelines.vlm import tap, untap
from mmspec.registry import resolve
from mmspec.session import Stats


class UnsupportedError(ValueError):
    """A model or a call that mmspec cannot accelerate; the message says why and what to do."""


class Handle:
    """An enabled model. Leaving it as a context manager disables it."""

    def __init__(self, model: Any, drafter: Any, config: SpecConfig) -> None:
        self.model = model
        self.drafter = drafter
        self.config = config
        self.stats = Stats()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def book(self, stats: Stats) -> None:
        with self._lock:
            self.stats.add(stats)

    def refuse(self, why: str) -> None:
        """Raise, or say once that the stock path runs; the law of what is generated is the same either way."""
        if self.config.on_unsupported == "error":
            raise UnsupportedError(
                f"mmspec cannot accelerate this call: {why}. Change it, call mmspec.disable(model), or enable with "
                f"on_unsupported='fallback' to run such calls on the stock path"
            )
        self.fall_back(why)

    def fall_back(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"mmspec runs the stock path: {why}", stacklevel=4)

    def disable(self) -> None:
        disable(self.model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"<mmspec on {type(self.model).__name__}: {type(self.drafter).__name__}, {self.config}>"


class _Enabled:
    """Mixin of an enabled model; `generate` lands in one of these for every mode that transformers has."""

    _mmspec_handle: Handle

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
        handle = self._mmspec_handle
        call = Call(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )
        why = obstacle(call)
        if why is None:
            output, stats = generate(self, handle.drafter, call)
            handle.book(stats)
            return output
        if "logits processor" in why:  # design: never skipped, never guessed; the stock path is always right
            handle.fall_back(why)
        else:
            handle.refuse(why)
        return super()._sample(  # type: ignore[misc]
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        self._mmspec_handle.refuse(
            "beam search (num_beams > 1) ranks whole sequences; a draft has nothing to save there"
        )
        return super()._beam_search(*args, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        self._mmspec_handle.refuse("assisted decoding (assistant_model, prompt_lookup_num_tokens) drafts by itself")
        return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]


def enable(model_or_pipe: Any, drafter: Any = None, **options: Any) -> Handle:
    """Accelerate a loaded model or pipeline in place; `generate` keeps its arguments, its output and its law.

    Args:
        model_or_pipe: a transformers model with `generate`, a `transformers.pipeline`, or a PEFT-wrapped model.
        drafter: None or "ngram" (no weights), a drafter's name on the hub, a folder, or a Drafter.
        **options: fields of SpecConfig: depth, width, size, on_unsupported.

    Returns:
        A Handle; also a context manager that disables on leaving. Enabling again replaces what was there.

    Raises:
        UnsupportedError: the model cannot be accelerated, or the drafter was made for another one.
    """
    config = SpecConfig.of(options)
    model = families.unwrap(model_or_pipe)
    why = families.unsupported(model)
    if why is not None:
        if config.on_unsupported == "error":
            raise UnsupportedError(f"mmspec cannot accelerate {type(model).__name__}: {why}")
        warnings.warn(f"mmspec leaves {type(model).__name__} as it is: {why}", stacklevel=2)
        return Handle(model, None, config)
    ready = resolve(drafter, config, families.describe(model))  # may fail: what was enabled before stays
    disable(model)
    handle = Handle(model, ready, config)
    tap(model, ready.features)
    swap(model, _Enabled, _mmspec_handle=handle)
    return handle


def disable(model_or_pipe: Any) -> None:
    """Give the model its stock behaviour back; nothing happens where it was not enabled."""
    model = families.unwrap(model_or_pipe)
    handle = getattr(type(model), "_mmspec_handle", None)
    if handle is not None:
        restore(model)
        untap(model, handle.drafter.features)


def stats(model_or_pipe: Any) -> Stats:
    """What the enabled model's calls did so far.

    Raises:
        UnsupportedError: the model is not enabled.
    """
    model = families.unwrap(model_or_pipe)
    handle = getattr(type(model), "_mmspec_handle", None)
    if handle is None:
        raise UnsupportedError(f"{type(model).__name__} is not enabled; call mmspec.enable(model) first")
    return handle.stats
