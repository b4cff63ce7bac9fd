"""The one place where captions meet a model: load it, enable mmspec on it, turn pictures and a prompt into texts."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import mmspec
from mmspec.app import embedded
from mmspec.pipelines.prompts import chat_inputs

STOCK = "none"  # the drafter that is none


class EngineError(Exception):
    """The model or the drafter cannot be used at all."""


@dataclass(frozen=True)
class Captions:
    """Answers of one batch: the texts, how many tokens each took, and the wall time of generate."""

    texts: list[str]
    tokens: list[int]
    seconds: float


class Engine:
    """A model with its processor and drafter; `drafter=None` is the stock path of transformers.

    A model that mmspec cannot accelerate captions all the same, on the stock path: `drafter` is None then and `notes`
    say why.
    """

    def __init__(self, model: Any, processor: Any, drafter: Any, max_new_tokens: int, temperature: float = 0):
        self.model, self.processor, self.drafter = model.eval(), processor, drafter
        self.sampling = temperature > 0
        warmth = {"do_sample": True, "temperature": temperature} if self.sampling else {"do_sample": False}
        self.settings = {"max_new_tokens": max_new_tokens, "num_beams": 1, **warmth}
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.notes: list[str] = []
        if drafter is not None:
            self._enable()

    def caption(self, images: list[Image.Image], prompt: str, **settings: Any) -> Captions:
        """One answer per picture to the same prompt, in one batch."""
        inputs = chat_inputs(self.processor, [prompt] * len(images), [[image] for image in images])
        inputs = inputs.to(self.model.device, self.model.dtype)
        begun = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(**inputs, **(self.settings | settings))
        if not self.model.config.is_encoder_decoder:
            out = out[:, inputs["input_ids"].shape[1] :]
        rows = [row[: answer_length(row, self.model.generation_config.eos_token_id)] for row in out.tolist()]
        seconds = time.perf_counter() - begun  # tolist() has waited for the device
        texts = self.processor.batch_decode(rows, skip_special_tokens=True)
        return Captions([text.strip() for text in texts], [len(row) for row in rows], seconds)

    def seed(self, number: int) -> None:
        """Make the next draws repeatable."""
        torch.manual_seed(number)

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside, the model generates as transformers made it."""
        mmspec.disable(self.model)
        try:
            yield
        finally:
            self._enable()

    def _enable(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            handle = mmspec.enable(self.model, drafter=self.drafter, on_unsupported="fallback")
        self.drafter = handle.drafter  # loaded once, however often the stock path is compared
        self.notes += [str(note.message) for note in said if issubclass(note.category, UserWarning)]


def load(model: str, drafter: str, device: str, dtype: str, max_new_tokens: int, temperature: float) -> Engine:
    """Engine for a name on the Hub, a local folder or an embedded model; `auto` picks the fastest device there is."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not Path(model).exists() and model != embedded.MODEL and model.count("/") != 1:
        raise EngineError(f"no folder {model!r}; a name on the Hub has the form owner/name")
    place = find_device(device)
    kind = ("float32" if place.type == "cpu" else "auto") if dtype == "auto" else dtype
    try:
        where = embedded.resolve(model)
        processor = AutoProcessor.from_pretrained(where)
        network = AutoModelForImageTextToText.from_pretrained(where, dtype=kind).to(place)
    except Exception as error:  # a missing folder, no network, an unknown architecture, too little memory: all fatal
        raise EngineError(f"cannot load the model {model!r}. {first_line(error)}") from error
    try:
        chosen = None if drafter == STOCK else embedded.resolve(drafter)
        return Engine(network, processor, chosen, max_new_tokens, temperature)
    except Exception as error:
        raise EngineError(
            f"cannot use the drafter {drafter!r} with {model!r}; choose another, 'ngram' (needs no weights) or "
            f"'{STOCK}' (no speed-up). {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    """Class and first line of an error, for people."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is the fastest there is."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None else torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EngineError(f"no device {name!r} here; choose auto, cpu, cuda, cuda:1 or mps") from error


def answer_length(row: list[int], eos: int | list[int] | None) -> int:
    """Tokens of a row up to and with its end-of-sequence token; what follows is padding."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    return next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
