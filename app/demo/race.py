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
from typing import Generic, TypeVar

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
        return sum(self.calls)

    @property
    def first(self) -> float:
        """When the first token was there."""
        return min(filter(None, self.at), default=0.0)


S = TypeVar("S", bound=RaceSide, covariant=True)


@dataclass(frozen=True)
class RaceView(Generic[S]):
    """What there is to see at one moment of a run."""

    plain: S
    fast: S
    over: bool = field(default=False, kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether both sides came to their ends."""
        return self.plain.state == self.fast.state == DONE


W = TypeVar("W")  # what is asked
V = TypeVar("V", bound=RaceView[RaceSide])
Q = TypeVar("Q")  # what the model is given for it


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
        """Of a side that did not come to its end."""
        return STOPPED if self.stop.is_set() else TIMED_OUT


class Race(Generic[W, V, Q]):
    """Both sides of one loaded model; one run at a time. A kind of model says how it begins, runs and ends."""

    time_limit = TIME_LIMIT

    def begin(self, wish: W, stop: threading.Event) -> tuple[V, Q]:
        """What there is to see at first, and what the model is given.

        Raises RefusedError, EngineError: the wish is not run.
        """
        raise NotImplementedError

    def side(self, both: V, fast: bool, request: Q, limits: Limits) -> None:
        """Run one of the two sides to its end, or to where the limits end it."""
        raise NotImplementedError

    def end(self, both: V, request: Q, limits: Limits) -> V:
        """What there is to see at the end; it is `over`."""
        raise NotImplementedError

    def rest(self) -> None:
        """Leave the model as transformers or diffusers made it."""

    def run(self, wish: W, stop: threading.Event) -> Iterator[V]:
        """What there is by now, again and again; the last is of the end. Raises RefusedError: the wish is not run."""
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
