"""`auto=True`: what rounds cost, measured, and a switch that turns drafting off where that is more than it gains.

A drafter that knows how much a draft promises is not turned off: it is told what drafts cost, and weighs each of them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import Tensor

from mmspec.protocols import Proposer, Target, reported
from mmspec.session import Session, holding
from mmspec.statistics import Stats
from mmspec.tree import lone
from mmspec.types import Draft, Prompt

Price = Callable[[int], float]  # of a draft by its nodes: the tokens that a row has to gain from it

KEPT = 9  # rounds of a size whose median counts, the latest
SURE = 3  # of them, before they count
STALE = 64  # rounds until the oldest measured round of every size is forgotten, so that one that was disturbed fades
MARGIN = 0.1  # what a draft has to promise beyond its price, as a share of it
DOUBT = 0.5  # the same while what was drafted lately did not pay

LOOK, PLAIN = 8, 3  # rounds with a draft, and before them without one, until a batch size is judged
JUDGED = 32  # drafted rounds that a judgement looks at, the latest
AGAIN = 128  # drafted rounds until one without a draft is timed again: the machine may have been busy before
GAIN, TRIALS = 0.02, 0.01  # what drafting has to gain, and what trials of it may lose: shares of the time


def _usual(nodes: int, device: str) -> float:
    """Before anything was measured: a CPU takes longer with every node, a GPU hardly."""
    if nodes == 1:
        return 1.0
    return 1.1 + 0.06 * nodes if device == "cpu" else 1.0 + 0.01 * nodes


class Prices:
    """Seconds of rounds by batch size and nodes, and what follows for the price of a draft."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._rounds = 0
        self.margin = MARGIN

    def book(self, batch: int, nodes: int, seconds: float) -> None:
        """One round; where nothing was drafted, `nodes` is 1."""
        self._seconds[batch, nodes].append(seconds)
        self._rounds += 1
        if self._rounds % STALE == 0:
            for (_, size), held in self._seconds.items():
                if size > 1 and held:
                    held.popleft()

    def cost(self, batch: int, nodes: int, device: str = "cpu") -> float:
        """How many rounds without a draft a round of so many nodes takes; what was not measured follows the usual
        costs, from the size next to it."""
        plain = list(self._seconds[batch, 1])
        if nodes == 1 or len(plain) < SURE:
            return _usual(nodes, device)
        known = {
            size: median(list(held)) / median(plain)
            for (rows, size), held in list(self._seconds.items())
            if rows == batch and size > 1 and len(held) >= SURE
        }
        if nodes in known or not known:
            return known.get(nodes, _usual(nodes, device))
        sizes = sorted(known)
        place = bisect_left(sizes, nodes)
        if 0 < place < len(sizes):
            low, high = sizes[place - 1], sizes[place]
            return known[low] + (known[high] - known[low]) * (nodes - low) / (high - low)
        near = sizes[min(place, len(sizes) - 1)]
        return known[near] * _usual(nodes, device) / _usual(near, device)

    def of(self, batch: int, device: str) -> Price:
        """What drafts of rows of this batch size cost, with the margin that they have to promise beyond it."""
        costs: dict[int, float] = {}

        def price(nodes: int) -> float:
            if nodes not in costs:
                costs[nodes] = self.cost(batch, nodes, device) * (1 + self.margin * (nodes > 1))
            return costs[nodes]

        return price


class Known:
    """What rounds of one drafter on one target cost and gain, by batch size: sizes up to a power of two are one."""

    def __init__(self) -> None:
        self.drafted: defaultdict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=JUDGED))
        self.plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=2 * PLAIN - 1))
        self.since: Counter[int] = Counter()  # drafted rounds since a plain one was timed
        self.seconds = self.lost = 0.0  # of all rounds; of those, by drafting
        self.prices = Prices()  # of drafts, for drafters that weigh them

    def book(self, batch: int, drafted: bool, seconds: float, gained: float) -> None:
        """One round: what it took, and the tokens that a row gained on average."""
        self.seconds += seconds
        if not drafted:
            self.plain[batch].append(seconds)
            self.since[batch] = 0
            return
        self.drafted[batch].append((seconds, gained))
        self.since[batch] += 1
        if self.plain[batch]:  # as it is before any draft is tested
            typical = median([each for each, _ in list(self.drafted[batch])])
            self.lost = max(0.0, self.lost + min(seconds, 2 * typical) - gained * median(self.plain[batch]))

    def pays(self, batch: int) -> bool | None:
        """Whether drafting gains clearly more than it costs; None: too little is known.

        A round that took more than twice the median is taken for one that took twice: the machine was busy, or torch
        compiled.
        """
        drafted, plain = list(self.drafted[batch]), list(self.plain[batch])
        if len(drafted) < LOOK or len(plain) < PLAIN:
            return None
        most = 2 * median([seconds for seconds, _ in drafted])
        spent = sum(min(seconds, most) for seconds, _ in drafted)
        return sum(gained for _, gained in drafted) * median(plain) > (1 + GAIN) * spent

    def wants_plain(self, batch: int) -> bool:
        """Whether a round without a draft has to be timed."""
        return len(self.plain[batch]) < PLAIN or self.since[batch] >= AGAIN

    def tries(self, batch: int) -> bool:
        """Whether rows that begin are drafted for: it pays, or nobody knows, or a trial is due."""
        judged = [size for size in list(self.plain) if self.pays(size) is not None]
        nearest = min(judged, key=lambda size: abs(size.bit_length() - batch.bit_length()), default=batch)
        if self.pays(nearest) is not False:
            return True
        if self.lost > TRIALS * self.seconds:
            return False
        self.drafted[nearest].clear()  # a trial is judged by itself
        return True


@dataclass
class _Memory:
    """The drafter's memory of some rows, while it drafts for them, and the counts from before their last round."""

    inner: Any  # Rows, or None
    on: bool
    stats: dict[str, float]
    # stats, their sums, batch size, nodes, drafted or not
    before_round: tuple[Stats, tuple[float, ...], int, int, bool] | None = None

    def select(self, rows: Tensor) -> _Memory:
        return replace(self, inner=None if self.inner is None else self.inner.select(rows))

    def join(self, other: _Memory) -> _Memory:
        """Rows are drafted for together or not at all, since who was not drafted for is not read up to its end."""
        on, inner = self.on and other.on, None
        if on and self.inner is not None and other.inner is not None:
            inner = self.inner.join(other.inner)
        return replace(self, inner=inner, on=on)


class Switch:
    """Proposes what a drafter proposes, or nothing: once off, for the rest of these rows.

    Args:
        drafter: fitted to its target. One with `prices` weighs every draft by itself and is never off: it is given the
            measured ones, and where its drafts did not pay lately, they have to promise more.
        known: of this drafter on this target, from earlier calls.
    """

    def __init__(self, drafter: Proposer, known: Known) -> None:
        self.weighs = hasattr(drafter, "prices")
        self.drafter = replace(drafter, prices=known.prices) if self.weighs else drafter  # type: ignore[type-var]
        self.known = known
        self.features, self.nodes = drafter.features, drafter.nodes

    def start(self, session: Session, target: Target, prompt: Prompt) -> _Memory:
        if not self.weighs and not self.known.tries(_size(session)):
            return _Memory(None, False, {})
        began, doubtful = time.perf_counter(), self.known.pays(_size(session)) is not True
        inner = self.drafter.start(session, target, prompt)
        self.known.lost += doubtful * (time.perf_counter() - began)
        return _Memory(inner, True, reported(inner))

    def propose(self, session: Session, target: Target) -> Draft:
        memory, known, batch = session.memory, self.known, _size(session)
        self._book(memory)
        if memory.on and known.pays(batch) is False and not self.weighs:
            memory.on, memory.inner = False, None
        known.prices.margin = DOUBT if self.weighs and known.pays(batch) is False else MARGIN
        draft = None
        if memory.on:
            with holding(session, memory.inner):
                draft = self.drafter.propose(session, target)
        nothing = draft is not None and draft.tree.size == 1 and getattr(self.drafter, "shares", False)
        leave = not memory.on or known.wants_plain(batch)
        if draft is not None and leave:
            draft.tokens.tolist()  # waits for a GPU, so that this round's other parts take what they always take
        tested = lone(session.pending[:, None]) if draft is None or leave else draft
        judged = leave or not nothing or self.weighs  # where a search found nothing, the round cost what others do
        before = (session.stats, _sums(session.stats), batch, tested.tree.size, not leave and not nothing)
        memory.before_round = before if judged else None
        return tested

    def _book(self, memory: _Memory) -> None:
        """Book the last round, if nothing but it was summed up meanwhile: rows that come bring sums of their own."""
        if memory.before_round is None:
            return
        stats, before, batch, nodes, drafted = memory.before_round
        seconds, drafting, rounds, rows, gained, tokens = (
            now - then for now, then in zip(_sums(stats), before, strict=True)
        )
        if rounds == 1 and gained == tokens:
            taken = seconds if drafted else seconds - drafting
            self.known.prices.book(batch, nodes, taken)
            self.known.book(batch, drafted, taken, gained / rows)


def _sums(stats: Stats) -> tuple[float, ...]:
    """Seconds of rounds, of drafting among them, rounds, of rows, what these gained, all tokens."""
    seconds = sum(much for part, much in stats.seconds.items() if part != "prefill")
    return seconds, stats.seconds.get("draft", 0.0), stats.rounds, stats.row_rounds, stats.gained, stats.tokens


def _size(session: Session) -> int:
    """The power of two that these rows fill."""
    return 1 << (len(session.rows) - 1).bit_length()
