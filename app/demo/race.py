"""A race: one request answered twice on one model, plainly and then accelerated, and when each token was there.

The sides are measured one after the other, while the page draws nothing but a count; it replays both afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmspec.app.demo.desk import RefusedError
from mmspec.app.devices import EngineError

TIME_LIMIT = 120.0  # seconds for both sides together
REFRESH = 0.25  # seconds between two counts
WAITING, RUNNING, DONE, STOPPED, TIMED_OUT = "", "running", "done", "stopped", "time limit reached"


@dataclass
class RaceSide:
    """One side as it is measured; times in seconds since it began.

    Attributes:
        at: when each token was there; 0: it is still to come.
        calls: tokens that each forward of the model gave, that of the prompt first.
    """

    state: str = WAITING
    seconds: float = 0.0
    at: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Tokens that there are."""
        return sum(self.calls)

    @property
    def first(self) -> float:
        """When the first token was there."""
        return min(filter(None, self.at), default=0.0)


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

        Raises RefusedError, EngineError: the wish is not run.
        """
        raise NotImplementedError

    def side(self, both: Any, one: Any, request: Any, limits: Limits) -> None:
        """Run one of the two sides to its end, or to where the limits end it."""
        raise NotImplementedError

    def end(self, both: Any, request: Any, limits: Limits) -> Any:
        """What there is to see at the end; it is `over`."""
        raise NotImplementedError

    def rest(self) -> None:
        """Leave the model as transformers or diffusers made it."""

    def run(self, wish: Any, stop: threading.Event) -> Iterator[Any]:
        """What there is by now, again and again; the last is of the end. Raises RefusedError: the wish is not run."""
        try:
            both, request = self.begin(wish, stop)
            limits = Limits(stop, time.monotonic() + self.time_limit)
            for one in (both.plain, both.fast):
                if not limits.over:
                    one.state = RUNNING
                    work = partial(self.side, both, one, request, limits)
                    with contextlib.closing(watched(work, stop)) as ticks:
                        for _ in ticks:
                            yield both
                if one.state != DONE:
                    one.state = limits.state
            yield self.end(both, request, limits)
        except EngineError as error:
            raise RefusedError(str(error)) from error
        finally:
            self.rest()

    def whole(self, wish: Any) -> Any:
        """A run that nobody looks at: what there is to see at its end."""
        *_, last = self.run(wish, threading.Event())
        return last


def watched(work: Callable[[], None], stop: threading.Event) -> Generator[None, None, None]:
    """Run `work` in a thread of its own; yields now and then while it goes on. Closing it sets `stop` and waits."""
    failed: list[BaseException] = []

    def whole() -> None:
        try:
            work()
        except BaseException as error:  # it belongs to whoever iterates
            failed.append(error)

    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            yield
            thread.join(REFRESH)
    except GeneratorExit:
        stop.set()
        raise
    finally:
        thread.join()
    if failed:
        raise failed[0]
