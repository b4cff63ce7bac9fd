"""The text models of diffusers pipelines: LlamaGen's T5 and its tokenizer, and those that write tokens."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5EncoderModel

from mmspec.pipelines.host.kinds import GenerativeModel

__all__ = ["PreTrainedTokenizerFast", "T5EncoderModel", "encoder_and_tokenizer", "writer"]


def encoder_and_tokenizer(where: str | Path) -> tuple[T5EncoderModel, Any]:
    """From a folder or the hub, in the types of the files."""
    return T5EncoderModel.from_pretrained(where, dtype="auto"), AutoTokenizer.from_pretrained(where)


def writer(pipe: object) -> GenerativeModel | None:
    """The component of a diffusers pipeline that writes tokens, as to lengthen a prompt; None: it has none.

    It is the one that can generate, if the pipeline's own code calls a `generate` at all; most pipelines only encode
    with their language models.

    Raises:
        TypeError: several can.
    """
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, dict) or not any(map(_generates, type(pipe).__mro__)):
        return None
    writers = {name: part for name, part in parts.items() if getattr(part, "can_generate", bool)() is True}
    if len(writers) > 1:
        raise TypeError(
            f"{type(pipe).__name__} has several models that can write: {', '.join(writers)}; enable one of them, as "
            f"pipe.{next(iter(writers))}"
        )
    return next(iter(writers.values()), None)


def _generates(cls: type) -> bool:
    try:
        return ".generate(" in inspect.getsource(cls)
    except (OSError, TypeError):  # a class without a file
        return False
