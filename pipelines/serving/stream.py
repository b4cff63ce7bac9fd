"""stream: `model.generate` as an iterator of steps, one per target call, that tell drafted tokens from the others."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from mmspec.modes import LOOKS_ON
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.assisted import setting
from mmspec.pipelines.host.call import calling
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.streaming import StepStreamer, Stopped
from mmspec.types import Round


@dataclass(frozen=True)
class Step:
    """What one forward pass of the target decided.

    Attributes:
        tokens: in order; those of `accepted` come first, then the target's own. The very first step has none: the
            prompt has been read, pictures included.
        accepted: drafted tokens that the target kept. The sequence may end among them, so `tokens` may hold fewer.
        seconds: since the call began.
        corrected: whether the last token stands where the draft had another one.
    """

    tokens: tuple[int, ...]
    accepted: int
    seconds: float
    corrected: bool = False


def stream(
    model_or_pipe: object, inputs: Any, stop: threading.Event | None = None, **settings: Any
) -> Generator[Step, None, None]:
    """Generate in a thread of its own and yield each step as it is made, on an enabled model and on a stock one alike.

    Closing the iterator, or setting `stop`, ends the generation after the step under way; a stopped stream just ends.

    Args:
        model_or_pipe: enabled or not; a stock model makes one token a step.
        inputs: what a processor returned, one row, as for `model.generate(**inputs)`.
        stop: set it from any thread to end the generation.
        settings: as for `generate`, such as `max_new_tokens` and `do_sample`; no `streamer`.

    Yields:
        Steps; all their `tokens` together are the answer, end-of-sequence included.

    Raises:
        ValueError: more than one row, several answers to it, or a streamer of the caller's own.
        Exception: whatever `generate` raised.
    """
    rows = len(inputs["input_ids"])
    if rows != 1:
        raise ValueError(f"stream follows one row; got {rows}. Call it once for each, or use model.generate")
    if settings.get("streamer") is not None:
        raise ValueError("stream puts a streamer of its own into the call; leave streamer out, and iterate")
    model = families.unwrap(model_or_pipe)
    answers = settings.get("num_return_sequences") or setting(
        "num_return_sequences", settings.get("generation_config"), getattr(model, "generation_config", None)
    )
    if (answers or 1) > 1:
        raise ValueError(f"stream follows one answer; got num_return_sequences={answers}. Call it once for each")
    relay = _Relay(stop)
    work = threading.Thread(
        target=contextvars.copy_context().run, args=(relay.run, model, inputs, settings), daemon=True
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
    """Puts steps into a queue: from rounds where the model is enabled, from streamed tokens where it is not."""

    def __init__(self, stop: threading.Event | None) -> None:
        self.steps: SimpleQueue[Step | BaseException | None] = SimpleQueue()
        self.closed = threading.Event()
        self._ends = [self.closed, *([stop] if stop is not None else [])]
        self._in_rounds = False

    def run(self, model: GenerativeModel, inputs: Any, settings: dict[str, Any]) -> None:
        self._thread, self._began = threading.get_ident(), time.perf_counter()
        criteria = [*(settings.get("stopping_criteria") or ()), Stopped(self._ends)]
        self._hook = model.register_forward_hook(self._read)
        arguments = {**settings, "streamer": StepStreamer(self._streamed), "stopping_criteria": criteria}
        try:
            with calling(watch=self._round):
                model.generate(**inputs, **arguments)
            self.steps.put(None)
        except BaseException as error:  # it belongs to whoever iterates
            self.steps.put(error)
        finally:
            self._hook.remove()

    def _read(self, model: GenerativeModel, *_: object) -> None:
        """The first forward pass of this call has ended: the prompt has been read."""
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

    def _streamed(self, tokens: list[int]) -> None:
        if not self._in_rounds:
            self._send(tuple(tokens), 0)

    def _send(self, tokens: tuple[int, ...], accepted: int, corrected: bool = False) -> None:
        self.steps.put(Step(tokens, accepted, time.perf_counter() - self._began, corrected))
