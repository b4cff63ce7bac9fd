"""The model behind the captions: what an engine has to offer, how it is loaded, and what it says of itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from PIL import Image

from mmspec.app.caption import settings
from mmspec.app.caption.options import AUTO, Options
from mmspec.app.prompt import PromptChoice

TOKENS = 1280  # visual tokens of a picture, where the model makes as many as there are pixels
PICTURE = (1024, 768)  # what is taken for an ordinary picture while none has been seen
PAYS = 10_000  # rounds that pay for compiling: some 10 ms less each, after a minute or two
COMPILING = "the model is compiled first, which takes a minute or two"
AUTO_ROWS = 4  # --batch-size auto of an engine that suggests nothing


class FatalError(Exception):
    """The run cannot go on: no model, or one that fails on item after item, so that the items are not to blame."""


class Answers(Protocol):
    """What an engine's `flow(rows)` returns: items go in one by one, answers come out as they are finished."""

    rows: int
    free: int
    busy: bool

    def add(self, ticket: Hashable, frames: Sequence[Image.Image], choice: PromptChoice, seed: int = 0) -> None: ...

    def step(self) -> Sequence[object]: ...  # each with ticket, text, tokens, seconds, error (None, or why no text)


class Model(Protocol):
    """What --engine MODULE:FUNCTION returns; it is called as `mmspec.app.engine.load` is."""

    notes: list[str]
    drafter: Any
    # One that has `suggest_rows(frames, size)` is asked by --batch-size auto, and one that is `compilable` is compiled
    # by `warm_up(frames, choice, rows)` where the run is long enough.

    def flow(self, rows: int) -> Answers: ...


def load(options: Options, place: str) -> Model:
    """The model behind the captions; FatalError if there is none. What --enable says goes to the engine by name."""
    enabled = settings.enable(options)
    module, _, function = options.engine.partition(":")
    try:
        loader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise FatalError(
            f"no engine {options.engine!r} ({error}); give MODULE:FUNCTION that Python can import"
        ) from error
    try:
        arguments = (options.model, options.drafter, place, options.dtype, options.max_new_tokens, options.temperature)
        engine: Any = loader(*arguments, **enabled)
        if (schema := settings.schema(options)) is not None:
            engine.keep_to(schema)
        if options.score:
            engine.scored = True
        return engine  # type: ignore[no-any-return]
    except Exception as error:  # whatever a model or somebody's engine meets while it loads ends the run
        named = isinstance(error, FatalError) or type(error).__name__ == "EngineError"
        raise FatalError(str(error) if named else f"{type(error).__name__}: {error}") from error


def rows_for(wanted: int | str, frames: int, engine: Any, size: tuple[int, int] = PICTURE) -> int:
    """How many items of so many frames of this size are at work at once, where --batch-size says `wanted`."""
    if wanted != AUTO:
        return int(wanted)
    return engine.suggest_rows(frames, size) if hasattr(engine, "suggest_rows") else AUTO_ROWS


def compiles(options: Options, items: int, frames: int, engine: Any) -> tuple[bool, str]:
    """Whether a worker with so many items to do compiles its model; with a line for people where it does, or cannot."""
    said = settings.enable(options).get("compile", options.compile)
    if said == AUTO:  # mmspec sees by itself whether it pays
        return False, ""
    able = getattr(engine, "compilable", False)
    if said is not None or not able:
        note = COMPILING if able else "this model cannot be compiled"
        return bool(said) and able, note * bool(said)
    rounds = items * options.max_new_tokens / (2 * rows_for(options.batch_size, frames, engine))
    note = f"{items} items are about {rounds:,.0f} rounds: {COMPILING} (--no-compile leaves it as it is)"
    return rounds >= PAYS, note * (rounds >= PAYS)


def area_for(wanted: int | str, engine: Any) -> tuple[int | None, str]:
    """Pixels that a picture may have at most when it reaches the model, where --max-pixels-per-image says `wanted`.

    Models that read pictures at their own size make a token of every few hundred pixels; `auto` gives them TOKENS at
    most. Others make pictures small by themselves. With it, a line for people; empty where nothing is changed.
    """
    if wanted != AUTO:
        return (None if wanted == "none" else int(wanted)), ""
    reader = getattr(getattr(engine, "processor", None), "image_processor", None)
    patch, merge = (getattr(reader, name, None) for name in ("patch_size", "merge_size"))
    if type(patch) is not int or type(merge) is not int:
        return None, ""
    area = TOKENS * (patch * merge) ** 2
    size: Any = getattr(reader, "size", None)
    own = getattr(reader, "max_pixels", None) or (size.get("longest_edge") if hasattr(size, "get") else None)
    if isinstance(own, int) and own <= area:
        return None, ""
    return area, (
        f"pictures of more than {area / 1e6:.1f} million pixels ({TOKENS} visual tokens) are made smaller; "
        "--max-pixels-per-image N sets another limit, or 'none'"
    )


def peak_memory(engine: Any) -> int | None:
    """Bytes: of the device where it counts them, else of this process; None where nobody tells."""
    device = getattr(getattr(engine, "model", None), "device", None)
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def dtype_of(engine: Any) -> str | None:
    kind = getattr(getattr(engine, "model", None), "dtype", None)
    return None if kind is None else str(kind).removeprefix("torch.")
