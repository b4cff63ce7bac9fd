"""The model that captions: how it is loaded, and its batch and picture sizes.

An engine of `--engine` has the interface of `mmspec.app.engine.Engine`; it may leave out `stock`, for a run that is not
compared with stock generate.
"""

from __future__ import annotations

import importlib
from typing import Any

from mmspec.app.caption.options import AUTO, NEVER, Options
from mmspec.app.extras import EngineError

TOKENS = 1280  # limit of visual tokens per picture, for models whose token count grows with the pixels
PICTURE = (1024, 768)  # assumed size of a picture until the first one is seen
PAYS = 10_000  # rounds from which on compiling pays: it takes a minute or two, and saves some 10 ms a round
COMPILING = "the model is compiled first, which takes a minute or two"


class FatalError(Exception):
    """The run cannot go on: there is no model, or it fails on every item, so that the items are not the cause."""


def load(options: Options, place: str) -> Any:
    """Load the engine; FatalError if that fails. The options of --enable are passed as keyword arguments."""
    module, _, function = options.engine.partition(":")
    try:
        loader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise FatalError(
            f"no engine {options.engine!r} ({error}); give MODULE:FUNCTION that Python can import"
        ) from error
    try:
        arguments = (options.model, options.drafter, place, options.dtype, options.max_new_tokens, options.temperature)
        engine = loader(*arguments, **options.enabled)
        if (schema := options.schema) is not None:
            engine.keep_to(schema)
        if options.score:
            engine.scored = True
        return engine
    except Exception as error:  # any error of a model or a user's engine while it loads ends the run
        named = isinstance(error, FatalError | EngineError)
        raise FatalError(str(error) if named else f"{type(error).__name__}: {error}") from error


def rows_for(wanted: int | str, frames: int, engine: Any, size: tuple[int, int] = PICTURE) -> int:
    """The batch size for items with so many frames of this size; `wanted` is the value of --batch-size."""
    return int(engine.suggest_rows(frames, size) if wanted == AUTO else wanted)


def compiles(options: Options, items: int, frames: int, engine: Any) -> tuple[bool, str]:
    """Whether a worker with so many items compiles its model, and a note for the user if it does, or cannot."""
    chosen = options.enabled.get("compile", options.compile)
    if chosen is not None or not engine.compilable:
        note = COMPILING if engine.compilable else "this model cannot be compiled"
        return bool(chosen) and engine.compilable, note * bool(chosen)
    rounds = items * options.max_new_tokens / (2 * rows_for(options.batch_size, frames, engine))
    note = f"{items} items are about {rounds:,.0f} rounds: {COMPILING} (--no-compile skips it)"
    return rounds >= PAYS, note * (rounds >= PAYS)


def area_for(wanted: int | str, engine: Any) -> tuple[int | None, str]:
    """The pixel limit of pictures for the model (None: no limit), and a note for the user if `auto` set one.

    `wanted` is the value of --max-pixels-per-image. Models that read pictures at native resolution use a token for
    every few hundred pixels; `auto` limits them to TOKENS. Other models scale pictures down by themselves.
    """
    if wanted != AUTO:
        return (None if wanted == NEVER else int(wanted)), ""
    reader = getattr(engine.processor, "image_processor", None)
    patch, merge = (getattr(reader, name, None) for name in ("patch_size", "merge_size"))
    if type(patch) is not int or type(merge) is not int:
        return None, ""
    area = TOKENS * (patch * merge) ** 2
    size: Any = getattr(reader, "size", None)
    own = getattr(reader, "max_pixels", None) or (size.get("longest_edge") if hasattr(size, "get") else None)
    if isinstance(own, int) and own <= area:
        return None, ""
    return area, (
        f"pictures of more than {area / 1e6:.1f} million pixels ({TOKENS} visual tokens) are scaled down; "
        "--max-pixels-per-image N sets another limit, or 'none'"
    )


def peak_memory(engine: Any) -> int | None:
    """Peak memory of a CUDA device, in bytes; None for other devices."""
    device = getattr(engine.model, "device", None)
    if device is None or device.type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(device)


def dtype_of(engine: Any) -> str | None:
    kind = getattr(engine.model, "dtype", None)
    return None if kind is None else str(kind).removeprefix("torch.")
