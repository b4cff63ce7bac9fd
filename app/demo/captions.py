"""Answers a question about a picture or a video twice: by stock generate, and accelerated."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import BaseModel, Field

import mmspec
from mmspec.app.demo.race import DONE, RUNNING, TIME_LIMIT, TIMED_OUT, Limits, Race, RaceSide, RaceView, RefusedError
from mmspec.app.engine import Engine, sampling_settings
from mmspec.app.media.decoder import Decoder
from mmspec.app.media.items import Item, file_source
from mmspec.app.media.video import FramePolicy, centres
from mmspec.config import SpecConfig, option_names
from mmspec.media import MediaError, MediaLimits
from mmspec.pipelines.host.kinds import BatchFeature
from mmspec.pipelines.host.reach import room_after
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.batcher import cut_off
from mmspec.pipelines.serving.stream import Step, stream
from mmspec.registry import name_of

MAX_PROMPT = 2000  # characters
MAX_FRAMES = 16
MAX_SEED = 2**31 - 1
WARM_UP = 2  # new tokens of a discarded warm-up for each side
PICTURE, VIDEO = "image", "video"  # the names in app/media/items.py
NOUNS = {PICTURE: "picture", VIDEO: "video"}
PLAIN, DRAFTED, CORRECTED, OWN = "plain", "drafted", "corrected", "own"  # kinds of tokens
# Photos and videos of phones are allowed, and scaled down before they leave the decoder process.
LIMITS = MediaLimits(max_pixels=64_000_000, max_bytes=64 * 2**20, seconds=20.0, max_duration=120.0)
LONGEST = 1024  # maximum side of the scaled picture, in pixels


class CaptionRequest(BaseModel, frozen=True):
    """A question and its settings, as received from the page; titles and descriptions are those of its controls."""

    kind: str  # PICTURE or VIDEO
    media: str | None
    prompt: str = Field(max_length=MAX_PROMPT)
    drafter: str = "ngram"
    depth: int = Field(default=0, ge=0, le=16, title="Depth", description="maximum draft length; 0: the drafter's own")
    width: int = Field(default=0, ge=0, le=12, title="Width", description="branches of a draft; 0: the drafter's own")
    size: int = Field(default=0, ge=0, le=96, title="Size", description="draft nodes per call; 0: the drafter's own")
    temperature: float = Field(default=0.0, ge=0, le=2, title="Temperature", description="0 is greedy decoding")
    top_p: float = Field(default=1.0, ge=0.05, le=1, title="Top-p", description="for temperatures above 0")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, title="Seed")
    reproducible: bool = Field(
        default=True, title="Same draws", description="above temperature 0: the tokens that stock generate draws"
    )
    max_new_tokens: int = Field(default=128, ge=1, le=512, title="New tokens", description="maximum")
    frames: int = Field(default=8, ge=1, le=MAX_FRAMES, title="Frames", description="of a video, evenly spaced")

    @property
    def noun(self) -> str:
        return NOUNS[self.kind]

    @property
    def options(self) -> dict[str, object]:
        """The options for `enable`."""
        shape = {name: value for name in ("depth", "width", "size") if (value := getattr(self, name))}
        return {**shape, "reproducible": self.temperature > 0 and self.reproducible}

    @property
    def settings(self) -> dict[str, object]:
        """The settings for `generate`."""
        drawn = sampling_settings(self.temperature, top_p=self.top_p)
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1, **drawn}


@dataclass
class Token:
    """A token of an answer: its text, its origin, and the number of tokens of its forward if it is their first."""

    id: int
    kind: str
    begins: int = 0
    text: str = ""


@dataclass
class Answer(RaceSide):
    accelerated: bool = False
    tokens: list[Token] = field(default_factory=list)
    accepted: int = 0
    cut: bool = False  # whether it was cut off at the maximum number of tokens

    def take(self, step: Step) -> None:
        """Record a step; the texts of its tokens are filled in later."""
        self.seconds = step.seconds
        if not step.tokens:
            return
        if self.tokens:
            self.accepted += step.accepted
        own = PLAIN if not self.accelerated else CORRECTED if step.corrected else OWN
        new = [Token(token, DRAFTED if n < step.accepted else own) for n, token in enumerate(step.tokens)]
        new[0].begins = len(new)
        self.calls.append(len(new))
        self.tokens += new
        self.at += [step.seconds] * len(new)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def tokens_per_target_call(self) -> float:
        """Tokens per forward after the prefill."""
        return 1.0 + self.accepted / (self.forwards - 1) if self.forwards > 1 else 0.0


@dataclass
class Turn(RaceView):
    question: CaptionRequest
    frames: Sequence[Image.Image] = ()  # that the model sees

    @classmethod
    def of(cls, question: CaptionRequest) -> Turn:
        """A turn without answers so far."""
        return cls(Answer(), Answer(accelerated=True), question)

    @property
    def compared(self) -> int:
        """Tokens that both answers have."""
        return min(len(self.plain.tokens), len(self.fast.tokens))

    @property
    def difference(self) -> int | None:
        """The first position with different tokens; None if there is none so far."""
        pairs = (zip_longest if self.ended else zip)(self.plain.ids, self.fast.ids)
        return next((place for place, (plain, fast) in enumerate(pairs) if plain != fast), None)

    @property
    def speed_up(self) -> float | None:
        """Time of the plain answer divided by that of the accelerated one, for the same number of tokens."""
        last = self.compared - 1
        return self.plain.at[last] / self.fast.at[last] if last >= 0 else None


class CaptionRace(Race):
    """Stock generate and mmspec on one loaded model.

    Args:
        decoder: see `media_decoder`.
        drafters: those to choose from besides the engine's own.
    """

    def __init__(
        self, engine: Engine, decoder: Decoder, time_limit: float = TIME_LIMIT,
        drafters: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.time_limit = decoder, time_limit
        self.model, self.processor = engine.model, engine.processor
        self.enabled = engine.options  # by the command line; the page overrides them
        self.name = name_of(engine.drafter)  # the initially chosen drafter
        self.drafters = {self.name: engine.drafter, **(drafters or {})}
        mmspec.disable(self.model)

    def measure(self, view: Turn, limits: Limits) -> None:
        question = view.question
        if not question.media:
            raise RefusedError(f"There is no {question.noun}. Upload one or choose an example.")
        if question.drafter not in self.drafters:
            raise RefusedError(f"There is no drafter {question.drafter!r}.")
        if not question.prompt.strip():
            raise RefusedError(f"The prompt is empty. Write what to ask about the {question.noun}.")
        view.frames = read_media(question, self.decoder)
        inputs = self.inputs(question, view.frames)
        short = question.model_copy(update={"max_new_tokens": WARM_UP})
        for cold in (Answer(accelerated=True), Answer()):  # one-time costs of this shape are not timed
            self._answer(cold, short, inputs, limits)
        for answer in (view.plain, view.fast):
            self._answer(answer, question, inputs, limits)

    def inputs(self, question: CaptionRequest, frames: Sequence[Image.Image]) -> BatchFeature:
        inputs = chat_inputs(self.processor, [question.prompt.strip()], [frames], clips=True)
        length, most = inputs["input_ids"].shape[1], question.max_new_tokens
        if most > (room := room_after(inputs, self.model)):
            raise RefusedError(
                f"The {question.noun} and the prompt take {length} tokens and the answer up to {most}; this model has "
                f"room for {length + room} in total. Shorten the prompt or the answer, or use fewer frames."
            )
        return inputs.to(self.model.device, self.model.dtype)

    def _answer(self, answer: Answer, question: CaptionRequest, inputs: BatchFeature, limits: Limits) -> None:
        if limits.over:
            answer.state = TIMED_OUT
            return
        with self._drafting(question) if answer.accelerated else contextlib.nullcontext():
            torch.manual_seed(question.seed)
            answer.state = RUNNING
            steps = stream(
                self.model, inputs, limits.stop, max_time=limits.deadline - time.monotonic(), **question.settings
            )
            with contextlib.closing(steps):
                for step in steps:
                    answer.take(step)
        split(answer.tokens, lambda ids: self.processor.decode(ids, skip_special_tokens=True))
        answer.state = TIMED_OUT if limits.over else DONE
        answer.cut = cut_off(answer.ids, self.model.generation_config.eos_token_id, question.max_new_tokens)

    def _drafting(self, question: CaptionRequest) -> Any:
        """Enable the chosen drafter, with the options of --enable that it takes; those of the page override them."""
        shared, initial = option_names(SpecConfig()), question.drafter == self.name
        options = {name: value for name, value in self.enabled.items() if initial or name in shared}
        try:
            return mmspec.enable(self.model, drafter=self.drafters[question.drafter], **{**options, **question.options})
        except ValueError as error:  # a shape that this drafter does not support
            raise RefusedError(f"{error}.") from error


def media_decoder() -> Decoder:
    """The decoder for `read_media`, a context manager."""
    return Decoder(1, LIMITS, FramePolicy("uniform", MAX_FRAMES), max_side=LONGEST)


def read_media(question: CaptionRequest, decoder: Decoder) -> list[Image.Image]:
    """The picture, or some frames of the video, decoded in another process; RefusedError if it cannot be used."""
    try:
        media = decoder.one(Item("upload", question.kind, file_source(Path(str(question.media)))))
    except MediaError as error:  # its advice is for the command line
        raise RefusedError(f"This {question.noun} {error.reason}. Choose another.") from error
    return centres(media.frames, question.frames)


def split(tokens: Sequence[Token], decode: Callable[[list[int]], str]) -> None:
    """Assign each token its piece of the text, such that the joined pieces are the decoded text of all tokens."""
    ids = [token.id for token in tokens]
    whole, done = decode(ids), 0
    for n, token in enumerate(tokens, 1):  # an incomplete character differs from the whole text
        end = len(whole) if n == len(ids) else len(os.path.commonprefix([decode(ids[:n]), whole]))  # noqa: RUF071
        token.text, done = whole[done : max(done, end)], max(done, end)
