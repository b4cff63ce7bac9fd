"""`compile="auto"`: a shape is captured once compiling it costs little beside the rounds that have asked for it."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

SHARE = 0.1  # of the time of all rounds so far, that compiling may take
FIRST = 10.0  # seconds that the first capture of a model is expected to take; later ones as long as the longest
OFTEN = 32  # rounds that a shape must have come up in, and rounds by which a capture is judged


@dataclass
class Spent:
    """Seconds that captures of one model, and of what drafts for it, took."""

    seconds: float = 0.0
    longest: float = 0.0

    def book(self, seconds: float) -> None:
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


@dataclass
class Patience:
    """Of one cache of captures: how long the rounds took that asked for each of its keys, with a capture and without.

    A round lasts from one request to the next within a call, so the user's own streamers are in it.
    """

    spent: Spent = field(default_factory=Spent)
    seconds: float = 0.0  # of all rounds
    _took: defaultdict[Any, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=OFTEN)))
    _last: tuple[Any, float] | None = None  # of the round under way: its key and whether captured; when it began

    def begin(self) -> None:
        """A call begins: what passed since the last one is no round."""
        self._last = None

    def asked(self, key: Any, captured: bool) -> None:
        """A round begins."""
        last, now = self._last, time.perf_counter()
        self._last = (key, captured), now
        if last is not None:
            self.seconds += now - last[1]
            self._took[last[0]].append(now - last[1])

    def due(self, key: Any) -> bool:
        """Whether to capture what was asked for."""
        expected = self.spent.longest or FIRST
        often = len(self._took[key, False]) == OFTEN
        return often and not self.regrets(key) and self.spent.seconds + expected <= SHARE * self.seconds

    def captured(self, seconds: float) -> None:
        """What was asked for was captured, or tried in vain."""
        self.spent.book(seconds)
        self.begin()

    def regrets(self, key: Any) -> bool:
        """Whether rounds with this capture have turned out to take longer than those without it."""
        before, since = self._took[key, False], self._took[key, True]
        return len(since) == OFTEN and median(since) > median(before)
