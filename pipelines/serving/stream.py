"""stream: `model.generate` as an iterator of steps, one per target call, with the number of accepted draft tokens."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from mmspec.modes import LOOKS_ON, for_thread
from mmspec.pipelines.host import wrappers
from mmspec.pipelines.host.assisted import setting
from mmspec.pipelines.host.call import calling
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.serving.batcher import require_one_row
from mmspec.types import Round


@dataclass(frozen=True)
class Step:
    """The result of one forward pass of the target.

    Attributes:
        tokens: the new tokens in order: first the accepted draft tokens, then the target's own. The very first step,
            after the prefill, has none.
        accepted: the number of accepted draft tokens. The sequence may end among them, so `tokens` may have fewer.
        seconds: the time since the call began.
        corrected: whether the last token replaces a rejected draft token.
    """

    tokens: tuple[int, ...]
    accepted: int
    seconds: float
    corrected: bool = False


def stream(
    model_or_pipe: object, inputs: Any, stop: threading.Event | None = None, **settings: Any
) -> Generator[Step, None, None]:
    """Generate in a separate thread and yield each step as soon as it is decided, on enabled and on stock models.

    Closing the iterator, or setting `stop`, ends the generation after the current step; a stopped stream just ends.

    Args:
        model_or_pipe: enabled or not; a stock model generates one token per step.
        inputs: the output of a processor for one row, as for `model.generate(**inputs)`.
        stop: set it from any thread to end the generation.
        settings: as for `generate`, such as `max_new_tokens` and `do_sample`; no `streamer`.

    Yields:
        Steps; the `tokens` of all steps together are the answer, including the end-of-sequence token.

    Raises:
        ValueError: more than one row, several answers to it, or a streamer.
        Exception: any error that `generate` raises.
    """
    require_one_row(inputs, "stream")
    if settings.get("streamer") is not None:
        raise ValueError("stream uses its own streamer; leave streamer out, and iterate over the steps")
    model, outer = wrappers.unwrap(model_or_pipe), wrappers.outer(model_or_pipe)
    answers = settings.get("num_return_sequences") or setting(
        "num_return_sequences", settings.get("generation_config"), getattr(model, "generation_config", None)
    )
    if (answers or 1) > 1:
        raise ValueError(f"stream yields one answer; got num_return_sequences={answers}. Call it once for each")
    relay = _Relay(stop)
    work = threading.Thread(
        target=contextvars.copy_context().run, args=(relay.run, model, outer, inputs, settings), daemon=True
    )
    work.start()
    try:
        while (step := relay.steps.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step
    finally:
        relay.closed.set()
        if threading.current_thread() is not work:  # an abandoned stream may be collected in its own thread
            work.join()


class _Relay:
    """Puts steps into a queue: from rounds if the model is enabled, else from streamed tokens.

    It is the call's streamer, and a stopping criterion that ends every row once the stream is closed or stopped.
    """

    ignores_tokens = True  # see stopping.py

    def __init__(self, stop: threading.Event | None) -> None:
        self.steps: SimpleQueue[Step | BaseException | None] = SimpleQueue()
        self.closed = threading.Event()
        self._ends = [self.closed, *([stop] if stop is not None else [])]
        self._there = for_thread()
        self._in_rounds = self._prompt_seen = False

    def run(self, model: GenerativeModel, outer: GenerativeModel, inputs: Any, settings: dict[str, Any]) -> None:
        self._thread, self._began = threading.get_ident(), time.perf_counter()
        criteria = [*(settings.get("stopping_criteria") or ()), self]
        self._hook = model.register_forward_hook(self._read)
        arguments = {**settings, "streamer": self, "stopping_criteria": criteria}
        try:
            with self._there(), calling(watch=self._round):
                outer.generate(**inputs, **arguments)
            self.steps.put(None)
        except BaseException as error:  # raised again in the iterating thread
            self.steps.put(error)
        finally:
            self._hook.remove()

    def _read(self, model: GenerativeModel, *_: object) -> None:
        """Forward hook: sends the first step, after the call's first forward pass, the prefill."""
        if threading.get_ident() != self._thread:
            return
        self._hook.remove()
        if model.device.type != "cpu":
            torch.accelerator.synchronize(model.device)
        self._send((), 0)

    setattr(_read, LOOKS_ON, True)

    def _round(self, round_: Round) -> None:
        self._in_rounds = True
        self._send(round_.new[0], round_.counts[0] - 1, round_.refused[0])

    def put(self, value: Tensor) -> None:
        """The new tokens of a step, one of each row; stock puts the prompt first."""
        if self._prompt_seen and not self._in_rounds:
            self._send(tuple(value.flatten().tolist()), 0)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to do, since `run` sends the end."""

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        ended = any(event.is_set() for event in self._ends)
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)

    def _send(self, tokens: tuple[int, ...], accepted: int, corrected: bool = False) -> None:
        self.steps.put(Step(tokens, accepted, time.perf_counter() - self._began, corrected))
