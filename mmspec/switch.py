"""`auto=True`: measure the cost of rounds, and turn drafting off while it costs more than it gains.

A drafter that estimates the gain of each draft is not turned off: it gets the measured costs and decides for itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from statistics import median
from typing import Any

from torch import Tensor

from mmspec.protocols import Proposer, Target, reported
from mmspec.session import Session, holding
from mmspec.statistics import Stats
from mmspec.tree import lone
from mmspec.types import Draft, Prompt

Price = Callable[[int], float]  # number of nodes of a draft → tokens that a row has to gain from it to break even

KEPT = 9  # latest rounds of each size, whose median is used
SURE = 3  # rounds of a size before their median is used
STALE = 64  # rounds after which the oldest time of every size is dropped, so that outliers fade
MARGIN = 0.1  # the expected gain of a draft must exceed its price by this share of the price
DOUBT = 0.5  # the same while recent drafts did not pay

LOOK, PLAIN = 8, 3  # rounds with and without a draft that are timed before a batch size is judged
JUDGED = 32  # latest drafted rounds that are judged; of a picture as many as give a whole one
AGAIN = 128  # drafted rounds until one without a draft is timed again: the machine may have been busy before
GAIN, TRIALS = 0.02, 0.01  # shares of the time: what drafting must gain, and what trials of it may lose


def _usual(nodes: int, device: str) -> float:
    """Cost before anything was measured: on a CPU it grows with every node, on a GPU hardly."""
    if nodes == 1:
        return 1.0
    return 1.1 + 0.06 * nodes if device == "cpu" else 1.0 + 0.01 * nodes


class Prices:
    """Measured seconds of rounds by batch size and number of nodes, and the price of a draft that follows from them."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._rounds = 0
        self.margin = MARGIN

    def book(self, batch: int, nodes: int, seconds: float) -> None:
        """Record one round; `nodes` is 1 if nothing was drafted."""
        self._seconds[batch, nodes].append(seconds)
        self._rounds += 1
        if self._rounds % STALE == 0:
            for (_, size), times in list(self._seconds.items()):
                if size > 1 and times:
                    times.popleft()

    def costs(self, batch: int, device: str = "cpu") -> Price:
        """The time of a round by its number of nodes, relative to a round without a draft. A size that was not measured
        is interpolated, or extrapolated from the nearest size in proportion to `_usual`."""
        single = list(self._seconds[batch, 1])
        plain = median(single) if len(single) >= SURE else 0.0
        measured = {
            size: median(list(times)) / plain
            for (rows, size), times in list(self._seconds.items())
            if plain and rows == batch and size > 1 and len(times) >= SURE
        }
        sizes = sorted(measured)

        def cost(nodes: int) -> float:
            if nodes in measured or not measured or nodes == 1:
                return measured.get(nodes, _usual(nodes, device))
            place = bisect_left(sizes, nodes)
            if 0 < place < len(sizes):
                low, high = sizes[place - 1], sizes[place]
                return measured[low] + (measured[high] - measured[low]) * (nodes - low) / (high - low)
            near = sizes[min(place, len(sizes) - 1)]
            return measured[near] * _usual(nodes, device) / _usual(near, device)

        return cost

    def of(self, batch: int, device: str) -> Price:
        """The price of drafts at this batch size: their cost plus the margin."""
        cost = self.costs(batch, device)
        return cache(lambda nodes: cost(nodes) * (1 + self.margin * (nodes > 1)))


class RoundCosts:
    """Costs and gains of the rounds of one drafter on one target, by batch size rounded up to a power of two.

    Attributes:
        whole: tokens of a picture, whose parts differ much in what drafts gain; 0 for text.
    """

    def __init__(self) -> None:
        self.whole = 0
        self.drafted: defaultdict[int, deque[tuple[float, float]]] = defaultdict(deque)
        self.plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=2 * PLAIN - 1))
        self.since: Counter[int] = Counter()  # drafted rounds since a plain one was timed
        self.seconds = self.lost = 0.0  # of all rounds; of these, time lost by drafting
        self.prices = Prices()  # for drafters that weigh their drafts

    def book(self, batch: int, drafted: bool, seconds: float, gained: float) -> None:
        """Record one round: its time, and the tokens that a row gained on average."""
        self.seconds += seconds
        if not drafted:
            self.plain[batch].append(seconds)
            self.since[batch] = 0
            return
        judged = self.drafted[batch]
        judged.append((seconds, gained))
        while len(judged) > JUDGED and _gained(judged) - judged[0][1] >= self.whole:
            judged.popleft()
        self.since[batch] += 1
        if self.plain[batch]:  # plain rounds are timed first
            typical = median([each for each, _ in list(self.drafted[batch])])
            self.lost = max(0.0, self.lost + min(seconds, 2 * typical) - gained * median(self.plain[batch]))

    def pays(self, batch: int) -> bool | None:
        """Whether drafting gains clearly more than it costs; None: too few rounds were measured.

        The time of a round is capped at twice the median: longer ones were disturbed by other work or by compilation.
        """
        drafted, plain = list(self.drafted[batch]), list(self.plain[batch])
        if len(drafted) < LOOK or len(plain) < PLAIN or _gained(drafted) < self.whole:
            return None
        most = 2 * median([seconds for seconds, _ in drafted])
        spent = sum(min(seconds, most) for seconds, _ in drafted)
        return _gained(drafted) * median(plain) > (1 + GAIN) * spent

    def wants_plain(self, batch: int) -> bool:
        """Whether a round without a draft must be timed now."""
        return len(self.plain[batch]) < PLAIN or self.since[batch] >= AGAIN

    def tries(self, batch: int) -> bool:
        """Whether to draft for rows that begin: it pays, or nothing is known, or a trial is due."""
        judged = [size for size in list(self.plain) if self.pays(size) is not None]
        nearest = min(judged, key=lambda size: abs(size.bit_length() - batch.bit_length()), default=batch)
        if self.pays(nearest) is not False:
            return True
        if self.lost > TRIALS * self.seconds:
            return False
        self.drafted[nearest].clear()  # a trial is judged by itself
        return True


def _gained(rounds: Iterable[tuple[float, float]]) -> float:
    """Tokens that a row gained in some drafted rounds."""
    return sum(gained for _, gained in rounds)


@dataclass
class _Memory:
    """The drafter's memory of some rows while drafting is on, and the sums before their last round."""

    inner: Any  # Rows, or None
    on: bool
    stats: dict[str, float]
    # stats, their sums, batch size, nodes, drafted or not
    before_round: tuple[Stats, tuple[float, ...], int, int, bool] | None = None

    def select(self, rows: Tensor) -> _Memory:
        return replace(self, inner=None if self.inner is None else self.inner.select(rows))

    def join(self, other: _Memory) -> _Memory:
        """Drafting stays on only if it is on for both, since a drafter that is off has not read its rows."""
        on, inner = self.on and other.on, None
        if on and self.inner is not None and other.inner is not None:
            inner = self.inner.join(other.inner)
        return replace(self, inner=inner, on=on)


class Switch:
    """A drafter that can be turned off; once off, it proposes nothing until these rows have ended.

    Args:
        drafter: fitted to its target. One with an attribute `prices` weighs every draft itself and is never off: it
            gets the measured prices, with a larger margin while its recent drafts did not pay.
        costs: of this drafter on this target, from earlier calls.
    """

    def __init__(self, drafter: Proposer, costs: RoundCosts) -> None:
        self.weighs = hasattr(drafter, "prices")
        self.drafter = replace(drafter, prices=costs.prices) if self.weighs else drafter  # type: ignore[type-var]
        self.costs = costs
        self.features, self.nodes = drafter.features, drafter.nodes

    def start(self, session: Session, target: Target, prompt: Prompt) -> _Memory:
        self.costs.whole = prod(prompt.grid) if prompt.grid else 0
        if not self.weighs and not self.costs.tries(_size(session)):
            return _Memory(None, False, {})
        began, doubtful = time.perf_counter(), self.costs.pays(_size(session)) is not True
        inner = self.drafter.start(session, target, prompt)
        self.costs.lost += doubtful * (time.perf_counter() - began)
        return _Memory(inner, True, reported(inner))

    def propose(self, session: Session, target: Target) -> Draft:
        memory, costs, batch = session.memory, self.costs, _size(session)
        self._book(memory)
        loses = memory.on and costs.pays(batch) is False
        if loses and not self.weighs:
            memory.on, memory.inner = False, None
        costs.prices.margin = DOUBT if loses else MARGIN
        draft = None
        if memory.on:
            with holding(session, memory.inner):
                draft = self.drafter.propose(session, target)
        empty = draft is not None and draft.tree.size == 1 and getattr(self.drafter, "shares", False)
        plain = not memory.on or costs.wants_plain(batch)
        if draft is not None and plain:
            draft.tokens.tolist()  # waits for a GPU, so that the discarded draft does not slow this round's other parts
        tested = lone(session.pending[:, None]) if draft is None or plain else draft
        judged = plain or not empty or self.weighs  # a search that found nothing costs nothing
        before = (session.stats, _sums(session.stats), batch, tested.tree.size, not plain and not empty)
        memory.before_round = before if judged else None
        return tested

    def _book(self, memory: _Memory) -> None:
        """Record the last round, unless the sums changed otherwise: rows that join add their own sums."""
        if memory.before_round is None:
            return
        stats, before, batch, nodes, drafted = memory.before_round
        seconds, drafting, rounds, rows, gained, tokens = (
            now - then for now, then in zip(_sums(stats), before, strict=True)
        )
        if rounds == 1 and gained == tokens:
            taken = seconds if drafted else seconds - drafting
            self.costs.prices.book(batch, nodes, taken)
            self.costs.book(batch, drafted, taken, gained / rows)


def _sums(stats: Stats) -> tuple[float, ...]:
    """Seconds of rounds, seconds of drafting, rounds, row rounds, tokens gained in rounds, all tokens."""
    seconds = sum(spent for part, spent in stats.seconds.items() if part != "prefill")
    return seconds, stats.seconds.get("draft", 0.0), stats.rounds, stats.row_rounds, stats.gained, stats.tokens


def _size(session: Session) -> int:
    """The number of rows, rounded up to a power of two."""
    return 1 << (len(session.rows) - 1).bit_length()
