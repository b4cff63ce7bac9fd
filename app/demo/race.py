"""A race: one model answers a request plainly and then accelerated, with the time of each token.

The sides are measured one after the other, while the page shows only a count; it replays both afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmspec.app.compare import free
from mmspec.app.devices import EngineError

TIME_LIMIT = 120.0  # seconds for both sides together
REFRESH = 0.25  # seconds between two counts
WAITING, RUNNING, DONE, TIMED_OUT = "", "running", "done", "time limit reached"
MODELS = ThreadPoolExecutor(1, "mmspec-demo")  # all models run in its one thread, so there is one race at a time


class RefusedError(EngineError):
    """A request is refused; the message is for the visitor."""


@dataclass
class RaceSide:
    """One side of a race; times are in seconds since it began.

    Attributes:
        at: when each token was generated; 0: not yet.
        calls: number of tokens from each forward of the model, beginning with the prefill's.
    """

    state: str = WAITING
    seconds: float = 0.0
    at: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.calls)

    @property
    def forwards(self) -> int:
        return len(self.calls)

    @property
    def first(self) -> float:
        """Time to the first token."""
        return min(filter(None, self.at), default=0.0)


@dataclass
class RaceView:
    """Both sides of a race; subclasses have the request as well. `over` is set once nothing changes any more."""

    plain: Any  # RaceSides
    fast: Any
    over: bool = field(default=False, kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether both sides have finished."""
        return bool(self.plain.state == self.fast.state == DONE)


@dataclass(frozen=True)
class Limits:
    stop: threading.Event
    deadline: float  # of time.monotonic

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def over(self) -> bool:
        return self.stop.is_set() or self.left <= 0


class Race:
    """Runs both sides on one loaded model. Subclasses implement `measure`."""

    time_limit = TIME_LIMIT
    stop: ClassVar[threading.Event] = threading.Event()  # ends the race that is running

    def measure(self, view: Any, limits: Limits) -> None:
        """Fill in both sides, until they end or the limits end them. RefusedError if the request is refused."""
        raise NotImplementedError

    def run(self, view: RaceView) -> Generator[Any, None, None]:
        """Yield the view while it is filled in; the last time it is final. Closing the iterator ends the race.

        Raises RefusedError or EngineError: the request is refused, or the model cannot be used.
        """
        stop = threading.Event()
        job = MODELS.submit(self._measured, view, stop)
        try:
            while not job.done():
                yield view
                wait([job], REFRESH)
        finally:
            job.cancel()
            stop.set()
        job.result()
        view.over = True
        yield view

    def _measured(self, view: RaceView, stop: threading.Event) -> None:
        Race.stop = stop
        try:
            self.measure(view, Limits(stop, time.monotonic() + self.time_limit))
        finally:
            free()


def close() -> None:
    """End all races, so that the process can end."""
    MODELS.shutdown(wait=False, cancel_futures=True)
    Race.stop.set()
