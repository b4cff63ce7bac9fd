"""Times calls of a vision-language model's `generate`: plain, with stock's assisted decoding, and with drafters."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.app.bench.questions import Question
from mmspec.app.compare import Method
from mmspec.app.devices import wait
from mmspec.app.engine import sampling_settings
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel
from mmspec.pipelines.host.vision import placeholders
from mmspec.pipelines.patching.handle import Handle
from mmspec.pipelines.prompts import chat, inputs_of, knows_clips
from mmspec.pipelines.serving.batcher import answer_length
from mmspec.statistics import Stats


@dataclass(frozen=True)
class TimedCall:
    seconds: float
    first: float  # seconds to the first token
    answers: tuple[tuple[int, ...], ...]  # token ids of each row, including its end token
    steps: int  # forwards of the target after the prefill
    later: int  # tokens from these forwards
    stats: Stats | None  # of mmspec's calls

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def decode_per_token(self) -> float | None:
        return (self.seconds - self.first) / self.later if self.later > 0 else None

    @property
    def per_step(self) -> float | None:
        return (self.seconds - self.first) / self.steps if self.steps > 0 else None


class Clock:
    """A streamer that records the time and number of the first generated tokens, and counts its calls."""

    def __init__(self) -> None:
        self.puts = -1  # the prompt is put first
        self.first_at = 0.0
        self.first_tokens = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 1:
            self.first_at, self.first_tokens = time.perf_counter(), tokens.numel()

    def end(self) -> None:
        """Required of streamers; does nothing."""


@contextlib.contextmanager
def enabled(model: GenerativeModel, drafter: object, **options: object) -> Iterator[Handle | None]:
    """Inside the block, the model uses this drafter, whose handle is yielded; with None it runs stock generate."""
    mmspec.disable(model)
    if drafter is None:
        yield None
    else:
        with mmspec.enable(model, drafter=drafter, **options) as handle:
            yield handle


@dataclass
class VlmBench:
    """The model and the settings that stay the same during a run."""

    model: GenerativeModel
    processor: Any
    max_new_tokens: int
    seed: int

    def inputs(self, batch: Sequence[Question]) -> BatchFeature:
        """Model inputs on the model's device, one row per question."""
        clips = knows_clips(self.processor)
        chats = [chat(q.prompt, q.images, clips=q.clip and clips) for q in batch]
        return inputs_of(self.processor, chats).to(self.model.device, self.model.dtype)

    def call(self, method: Method, temperature: float, inputs: Mapping[str, Tensor], seed: int) -> TimedCall:
        """One timed call; garbage collection and enabling are not timed."""
        arguments = {**sampling_settings(temperature, top_k=0, top_p=1.0), **method.arguments}
        with enabled(self.model, method.drafter, **method.options) as handle:
            torch.manual_seed(seed)
            return self.timed(inputs, None if handle is None else handle.stats, **arguments)

    def timed(self, inputs: Mapping[str, Tensor], stats: Stats | None = None, **arguments: object) -> TimedCall:
        """One timed call of the model in its current state; `stats` are those of the enabled drafter, if any."""
        clock = Clock()
        gc.collect()
        wait(self.model.device)
        began = time.perf_counter()
        out = self.model.generate(
            **inputs, num_beams=1, max_new_tokens=self.max_new_tokens, streamer=clock, **arguments
        )
        wait(self.model.device)
        seconds = time.perf_counter() - began
        end = self.model.generation_config.eos_token_id
        rows = out[:, inputs["input_ids"].shape[1] :].tolist()
        answers = tuple(tuple(row[: answer_length(row, end)]) for row in rows)
        steps = stats.rounds if stats is not None else clock.puts - 1
        later = sum(map(len, answers)) - clock.first_tokens
        return TimedCall(seconds, clock.first_at - began, answers, steps, later, stats)

    def visual_tokens(self, inputs: BatchFeature) -> float:
        """Mean number of picture tokens per prompt."""
        ids = inputs["input_ids"]
        return sum(int((ids == token).sum()) for token in placeholders(self.model.config)) / len(ids)
