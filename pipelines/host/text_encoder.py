"""The text models of diffusers pipelines: LlamaGen's T5 encoder and tokenizer, and models that generate tokens."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5EncoderModel

from mmspec.pipelines.host.kinds import GenerativeModel

__all__ = ["PreTrainedTokenizerFast", "T5EncoderModel", "encoder_and_tokenizer", "writer"]


def encoder_and_tokenizer(where: str | Path) -> tuple[T5EncoderModel, Any]:
    """Load both from a folder or the hub, in the dtype of the files."""
    return T5EncoderModel.from_pretrained(where, dtype="auto"), AutoTokenizer.from_pretrained(where)


def writer(pipe: object) -> GenerativeModel | None:
    """The component of a diffusers pipeline that generates tokens, for example to extend a prompt; None: none does.

    It is the one that can generate, if the pipeline's own code calls a `generate` at all; most pipelines use their
    language models only as encoders.

    Raises:
        TypeError: several components can generate.
    """
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, dict) or not any(map(_generates, type(pipe).__mro__)):
        return None
    writers = {name: part for name, part in parts.items() if getattr(part, "can_generate", bool)() is True}
    if len(writers) > 1:
        raise TypeError(
            f"{type(pipe).__name__} has several models that can generate: {', '.join(writers)}; enable one of them, "
            f"such as pipe.{next(iter(writers))}"
        )
    return next(iter(writers.values()), None)


def _generates(cls: type) -> bool:
    try:
        return ".generate(" in inspect.getsource(cls)
    except (OSError, TypeError):  # a class without a file
        return False
