"""The text encoder of LlamaGen, which is transformers' T5, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5EncoderModel

__all__ = ["PreTrainedTokenizerFast", "T5EncoderModel", "encoder_and_tokenizer"]


def encoder_and_tokenizer(where: str | Path) -> tuple[Any, Any]:
    """From a folder or the hub, in the types of the files."""
    return T5EncoderModel.from_pretrained(where, dtype="auto"), AutoTokenizer.from_pretrained(where)
