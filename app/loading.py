"""A model of transformers, which sees pictures or reads text alone, and what prepares its inputs."""

from __future__ import annotations

from typing import Any


def model_and_processor(where: str, dtype: Any) -> tuple[Any, Any]:
    """The model, and its processor; of a model of text alone its tokenizer.

    Raises:
        OSError, ValueError: there is no such model, or none that writes text.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )

    config = AutoConfig.from_pretrained(where)
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    if sees or type(config) not in AutoModelForCausalLM._model_mapping:
        processor = AutoProcessor.from_pretrained(where)
        return AutoModelForImageTextToText.from_pretrained(where, dtype=dtype), processor
    return AutoModelForCausalLM.from_pretrained(where, dtype=dtype), AutoTokenizer.from_pretrained(where)
