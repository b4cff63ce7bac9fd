"""One question answered twice on one model: first as transformers made it, then accelerated, never both at once."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import mmspec
from mmspec.app import media
from mmspec.app.demo_answer import DONE, READING, STOPPED, TIMED_OUT, Answer, Ask, RefusedError, Transcript, Turn
from mmspec.app.engine import Engine
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.stream import stream

MAX_PIXELS = 16_000_000  # of an uploaded picture
TIME_LIMIT = 120.0  # seconds for both answers together
BUSY = 5.0  # seconds to wait for a run that is being stopped
REFRESH = 0.12  # seconds between two looks at an answer under way


class Duo:
    """Both paths of one loaded model, one run at a time."""

    def __init__(self, engine: Engine, time_limit: float = TIME_LIMIT) -> None:
        self.model, self.processor, self.time_limit = engine.model, engine.processor, time_limit
        name = getattr(engine.drafter, "method", "ngram")
        self.drafters: dict[str, Any] = {name: engine.drafter, "ngram": "ngram"}
        self.name = name  # of the drafter to begin with
        wish = getattr(engine.drafter, "options", None) or engine.drafter.config
        self.tree = (wish.depth or 5, wish.width or 1, wish.size or 6)
        self._lock = threading.Lock()
        mmspec.disable(self.model)

    def run(self, ask: Ask, stop: threading.Event) -> Iterator[Turn]:
        """Looks at a run while it goes on; the last one is of its end.

        Raises:
            RefusedError: the question is not run.
        """
        ask.check()
        if ask.drafter not in self.drafters:
            raise RefusedError(f"No drafter {ask.drafter!r} here; choose from {', '.join(self.drafters)}.")
        began = time.perf_counter()
        inputs = self._inputs(ask)
        turn = Turn(Answer(False), Answer(True), ask.temperature > 0, time.perf_counter() - began)
        if not self._lock.acquire(timeout=BUSY):
            raise RefusedError("The model is still busy with another run. Try again in a moment.")
        try:
            deadline = time.monotonic() + self.time_limit
            for answer in (turn.plain, turn.fast):
                for _ in self._answer(answer, ask, inputs, stop, deadline):
                    yield turn
            yield dataclasses.replace(turn, over=True, difference=self._difference(turn, ask, inputs))
        finally:
            mmspec.disable(self.model)
            self._lock.release()

    def warm_up(self, image: str, prompt: str) -> None:
        """Pay for what only the first run of a process costs."""
        depth, width, size = self.tree
        for drafter in self.drafters:
            for _ in self.run(Ask(image, prompt, drafter, depth, width, size, max_new_tokens=8), threading.Event()):
                pass

    def _inputs(self, ask: Ask) -> Any:
        try:
            picture = media.load_image(str(ask.image), MAX_PIXELS)
        except media.MediaError as error:
            raise RefusedError(f"This picture {error.reason}; {error.what_to_do}.") from error
        inputs = chat_inputs(self.processor, [ask.prompt.strip()], [[picture]])
        length = inputs["input_ids"].shape[1]
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if room is not None and length + ask.max_new_tokens > room:
            raise RefusedError(
                f"Picture and prompt take {length} tokens and the answer up to {ask.max_new_tokens}; this model has "
                f"room for {room} together. Shorten the prompt or the answer."
            )
        return inputs.to(self.model.device, self.model.dtype)

    def _answer(self, answer: Answer, ask: Ask, inputs: Any, stop: threading.Event, deadline: float) -> Iterator[None]:
        """Write one answer; yields when there is something new to see."""
        left = deadline - time.monotonic()
        if stop.is_set() or left <= 0:
            answer.state = STOPPED if stop.is_set() else TIMED_OUT
            return
        answer.state = READING
        yield
        if answer.accelerated:
            mmspec.enable(self.model, drafter=self.drafters[ask.drafter], **ask.tree)
        torch.manual_seed(0)
        transcript, shown = Transcript(self._decode), time.monotonic()
        with contextlib.closing(stream(self.model, inputs, stop, max_time=left, **ask.settings)) as steps:
            for step in steps:
                for token in answer.take(step):
                    transcript.add(token)
                if time.monotonic() - shown >= REFRESH:
                    yield
                    shown = time.monotonic()
        transcript.close()
        answer.state = STOPPED if stop.is_set() else TIMED_OUT if time.monotonic() >= deadline else DONE
        yield

    def _decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids, skip_special_tokens=True)

    def _difference(self, turn: Turn, ask: Ask, inputs: Any) -> tuple[int, float | None] | None:
        """The first token that differs, with the gap of the two best stock logits there; None if there is none."""
        mmspec.disable(self.model)
        plain, fast, n = turn.plain.ids, turn.fast.ids, turn.compared
        ended = turn.plain.state == turn.fast.state == DONE
        where = next((i for i in range(n) if plain[i] != fast[i]), n if ended and len(plain) != len(fast) else None)
        if turn.sampled or where is None:
            return None
        again = {**ask.settings, "max_new_tokens": where + 1, "max_time": self.time_limit}
        stock = self.model.generate(**inputs, **again, return_dict_in_generate=True, output_scores=True)
        best = stock.scores[where][0].topk(2).values if len(stock.scores) > where else None
        return where, None if best is None else float(best[0] - best[1])
