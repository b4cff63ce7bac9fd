"""A race: one request answered twice on one model, plainly and then accelerated, and what there is to see meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from PIL import Image

from mmspec.app.demo.answer import DONE, STOPPED, TIMED_OUT
from mmspec.app.demo.desk import RefusedError
from mmspec.app.devices import EngineError

TIME_LIMIT = 120.0  # seconds for both sides together
DRAWING = "drawing"
REFRESH = 0.25  # seconds between two looks at a picture under way


@dataclass(frozen=True)
class Limits:
    """When a run has to end."""

    stop: threading.Event
    deadline: float  # of time.monotonic

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def over(self) -> bool:
        return self.stop.is_set() or self.left <= 0

    @property
    def state(self) -> str:
        """Of a side that did not come to its end."""
        return STOPPED if self.stop.is_set() else TIMED_OUT


class Race:
    """Both sides of one loaded model; one run at a time. A kind of model says how it begins, runs and ends."""

    time_limit = TIME_LIMIT

    def begin(self, wish: Any, stop: threading.Event) -> tuple[Any, Any]:
        """What there is to see at first, with a `plain` and a `fast` side, and what the model is asked.

        Raises:
            RefusedError, EngineError: the wish is not run.
        """
        raise NotImplementedError

    def side(self, both: Any, one: Any, asked: Any, limits: Limits) -> Iterator[None]:
        """Run one of the two sides; yields when there is something new to see."""
        raise NotImplementedError

    def end(self, both: Any, asked: Any, limits: Limits) -> Any:
        """The last look."""
        raise NotImplementedError

    def rest(self) -> None:
        """Leave the model as transformers or diffusers made it."""

    def run(self, wish: Any, stop: threading.Event) -> Iterator[Any]:
        """Looks at a run while it goes on; the last one is of its end.

        Raises:
            RefusedError: the wish is not run.
        """
        try:
            both, asked = self.begin(wish, stop)
            limits = Limits(stop, time.monotonic() + self.time_limit)
            for one in (both.plain, both.fast):
                if not limits.over:
                    for _ in self.side(both, one, asked, limits):
                        yield both
                if one.state != DONE:
                    one.state = limits.state
            yield self.end(both, asked, limits)
        except EngineError as error:
            raise RefusedError(str(error)) from error
        finally:
            self.rest()

    def whole(self, wish: Any) -> Any:
        """A run that nobody looks at: what there is to see at its end."""
        *_, last = self.run(wish, threading.Event())
        return last


class Raced:
    """Two pictures, drawn one after the other."""

    plain: Any
    fast: Any

    @property
    def speed_up(self) -> float | None:
        done = self.plain.state == self.fast.state == DONE
        return self.plain.seconds / self.fast.seconds if done else None


class Ended(Exception):
    """Thrown into a call of a pipeline to end it, and put into the queue when it has ended."""


def painted(
    canvas: Any, paint: Callable[[Any], Any], look: Callable[[Any], Image.Image], limits: Limits
) -> Iterator[None]:
    """Draw one of two pictures in a thread of its own; yields when there is something new to see.

    Args:
        canvas: takes what there is after each step, and finishes with what `paint` gives.
        paint: a call of a pipeline, which tells the callback it is given of each step.
        look: the picture so far, of its tokens.
    """

    def work(show: Callable[[], None]) -> None:
        began = shown = time.perf_counter()
        spent = 0.0  # on looking, which is not the model's time

        def seen(_: Any, step: int, __: int, state: dict[str, Any]) -> None:
            nonlocal shown, spent
            now = time.perf_counter()
            if limits.over:
                raise Ended
            canvas.take(step, state["tokens"][0], now - began - spent)
            if now - shown >= REFRESH:
                canvas.image = look(state["tokens"][0])
                show()
                shown = time.perf_counter()
                spent += shown - now

        made = paint(seen)
        canvas.finish(made, made.seconds - spent)

    canvas.state = DRAWING
    with contextlib.closing(watched(work)) as looks:
        yield from looks


def watched(work: Callable[[Callable[[], None]], None]) -> Generator[None, None, None]:
    """Run `work` in a thread of its own; yields when it begins, ends, or calls what it is given.

    What it calls raises Ended once nobody looks any more.
    """
    looks: SimpleQueue[BaseException | None] = SimpleQueue()
    closed = threading.Event()

    def show() -> None:
        if closed.is_set():
            raise Ended
        looks.put(None)

    def whole() -> None:
        try:
            work(show)
            looks.put(Ended())
        except BaseException as error:  # it belongs to whoever iterates
            looks.put(error)

    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    try:
        yield
        while not isinstance(look := looks.get(), Ended):
            if isinstance(look, BaseException):
                raise look
            yield
        yield
    finally:
        closed.set()
        thread.join()
