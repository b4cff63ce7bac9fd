"""A race: one request answered twice on one model, plainly and then accelerated, with the time of each token.

The sides are measured one after the other, while the page shows only a count; it replays both afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from mmspec.app.demo.desk import RefusedError
from mmspec.app.devices import EngineError

TIME_LIMIT = 120.0  # seconds for both sides together
REFRESH = 0.25  # seconds between two counts
WAITING, RUNNING, DONE, STOPPED, TIMED_OUT = "", "running", "done", "stopped", "time limit reached"


@dataclass
class RaceSide:
    """One side of a race; times are in seconds since it began.

    Attributes:
        at: when each token was generated; 0: not yet.
        calls: number of tokens from each forward of the model, beginning with the prefill.
    """

    state: str = WAITING
    seconds: float = 0.0
    at: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.calls)

    @property
    def first(self) -> float:
        """Time to the first token."""
        return min(filter(None, self.at), default=0.0)


S = TypeVar("S", bound=RaceSide, covariant=True)


@dataclass(frozen=True)
class RaceView(Generic[S]):
    """The state of both sides at one moment of a run."""

    plain: S
    fast: S
    over: bool = field(default=False, kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether both sides have finished."""
        return self.plain.state == self.fast.state == DONE


W = TypeVar("W")  # the visitor's request
V = TypeVar("V", bound=RaceView[RaceSide])
Q = TypeVar("Q")  # the model inputs for it


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

    @property
    def state(self) -> str:
        """The state of a side that was ended by the limits."""
        return STOPPED if self.stop.is_set() else TIMED_OUT


class Race(Generic[W, V, Q]):
    """Runs both sides on one loaded model, one run at a time. Subclasses implement `begin`, `side` and `end`."""

    time_limit = TIME_LIMIT

    def begin(self, wish: W, stop: threading.Event) -> tuple[V, Q]:
        """The initial view, and the model inputs.

        Raises RefusedError, EngineError: the wish is refused.
        """
        raise NotImplementedError

    def side(self, both: V, fast: bool, request: Q, limits: Limits) -> None:
        """Run one of the two sides until it ends, or the limits end it."""
        raise NotImplementedError

    def end(self, both: V, request: Q, limits: Limits) -> V:
        """The final view, with `over` set."""
        raise NotImplementedError

    def rest(self) -> None:
        """Restore the stock model after a run."""

    def run(self, wish: W, stop: threading.Event) -> Iterator[V]:
        """Yield the current view repeatedly; the last one is final. Raises RefusedError: the wish is refused."""
        try:
            both, request = self.begin(wish, stop)
            limits = Limits(stop, time.monotonic() + self.time_limit)
            for fast, one in enumerate((both.plain, both.fast)):
                if not limits.over:
                    one.state = RUNNING
                    work = partial(self.side, both, bool(fast), request, limits)
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

    def whole(self, wish: W) -> V:
        """Run to the end without showing progress; returns the final view."""
        *_, last = self.run(wish, threading.Event())
        return last


def watched(work: Callable[[], None], stop: threading.Event) -> Generator[None, None, None]:
    """Run `work` in a thread, and yield now and then until it ends. Closing the generator sets `stop` and waits."""
    failed: list[BaseException] = []

    def whole() -> None:
        try:
            work()
        except BaseException as error:  # raised in the iterating thread below
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
