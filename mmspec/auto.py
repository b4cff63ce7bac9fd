"""How much to draft, or nothing: by what rounds cost here and by how much of a draft stands (`auto=True`)."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.rows import gather_rows
from mmspec.session import Stats
from mmspec.tree import chain, lone
from mmspec.types import Categorical, Draft, Drafter, Prompt, Round, Scores, Target

NONE = 1  # the shape of a draft that proposes nothing: the root alone
SAMPLES = 3  # stretches of each shape before anything is decided, and rounds timed at least of NONE and the largest
DECAY = 0.97  # of what is known of acceptance, a stretch
PATIENCE, MOST = 32, 256  # stretches between looks at what is least known: at first or once one paid, and at most
SHARE = 0.02  # of the time: what such looks may cost, even if nothing stands, and what drafting has to gain


class Known:
    """What is known of one drafter's shapes on one target; a shape is the number of nodes of its drafts.

    Of the text alone, a smaller draft is the first nodes of a larger one, so that a round tells what each smaller shape
    would have gained. A draft that refines the one before is as good as it gets after `settles` rounds of its shape:
    then a shape is kept for a stretch of twice as many, of which those that have settled tell of this shape, and of no
    other. What was known of acceptance fades, so that a look at what was not drafted of late counts for much. A round
    costs what such rounds took of late, or lies on the line between those with nothing and with all of a draft.

    Args:
        shapes: ascending, from NONE on.
        settles: 0: drafts depend on the text alone.
    """

    def __init__(self, shapes: Iterable[int], settles: int = 0) -> None:
        self.shapes, self.settles, self.stretch = tuple(shapes), settles, 2 * settles or 1
        self.fade = DECAY ** (1 / self.stretch)
        self.rounds = dict.fromkeys(self.shapes, 0)  # that told of a shape
        self.rows = dict.fromkeys(self.shapes, 0.0)  # in them, faded
        self.tokens = dict.fromkeys(self.shapes, 0.0)  # that these gained, faded likewise
        self.times: dict[tuple[int, int], deque[float]] = {}  # of late, by batch size and shape
        self.costs: dict[tuple[int, int], float] = {}  # their medians
        self.idle, self.patience, self.looked = 0, PATIENCE * self.stretch, self.shapes[-1]
        self.drafted = 0  # rounds in a row

    def book(
        self, batch: int, shape: int, seconds: float, stood: Sequence[Sequence[int]], since: int = 1,
        late: bool = False,
    ) -> None:  # fmt: skip
        """One round: what it took, and which nodes of the draft stood in each row, ascending, the root among them.

        Args:
            since: rounds of this shape in a row, this one included.
            late: the drafter first read what it had missed, so that such rounds take this much at most.
        """
        times = self.times.setdefault((batch, shape), deque(maxlen=7))
        if not (late and times and seconds >= self.costs[batch, shape]):
            times.append(seconds)
            self.costs[batch, shape] = statistics.median(times)
        self.idle += 1
        self.drafted = 0 if shape == NONE else self.drafted + 1
        for told in self.shapes:
            self.rows[told] *= self.fade
            self.tokens[told] *= self.fade
            if told <= shape if not self.settles else told == shape and since > self.settles:
                self.rounds[told] += 1
                self.rows[told] += len(stood)
                self.tokens[told] += sum(bisect_left(row, told) for row in stood)

    def gain(self, shape: int) -> float:
        """Tokens that a row gets of a round of this shape."""
        return self.tokens[shape] / self.rows[shape] if self.rows[shape] else 1.0

    def cost(self, batch: int, shape: int) -> float:
        """Seconds of a round of this shape, once those with nothing and with all of a draft have been timed.

        What larger drafts take it takes at most: a machine that was slow when a shape was last timed misleads no more.
        """
        low, high = (self.costs[batch, end] for end in (NONE, self.shapes[-1]))
        line = low + (high - low) * (shape - NONE) / (self.shapes[-1] - NONE)
        larger = (self.costs.get((batch, other), line) for other in self.shapes if other > shape)
        return min(self.costs.get((batch, shape), line), *larger, high)

    def choose(self, batch: int) -> int:
        """The shape with clearly the most tokens a second; now and then the one of which least is known."""
        for shape in reversed(self.shapes):
            timed = len(self.times.get((batch, shape), ())) if shape in (NONE, self.shapes[-1]) else SAMPLES
            told = SAMPLES if shape == NONE else self.rounds[shape] / max(self.settles, 1)
            if min(timed, told) < SAMPLES:
                return shape
        if self.drafted >= MOST * self.stretch:
            return NONE  # what it costs may have been timed on a machine that was busy then
        clear = {NONE: 1 + SHARE}  # what gains less may as well be the clock's own unrest
        best = max(self.shapes, key=lambda shape: self.gain(shape) / self.cost(batch, shape) * clear.get(shape, 1.0))
        least = min(self.shapes[:0:-1], key=self.rows.__getitem__)
        if best == self.looked:
            self.patience = PATIENCE * self.stretch
        lost = self.stretch * (self.cost(batch, self.looked) / self.cost(batch, best) - 1 / self.gain(best))
        if self.idle < max(self.patience, lost / SHARE):  # in rounds of the best shape, by the last look, at most
            return best
        self.idle, self.patience, self.looked = 0, min(2 * self.patience, MOST * self.stretch), least
        return least


@dataclass(frozen=True)
class Pace:
    """The round under way, or the last one."""

    known: Known
    batch: int  # sizes up to this power of two cost about the same
    shape: int
    spent: float  # seconds, before it
    since: int  # rounds of this shape in a row, this one included
    late: bool  # whether the drafter first reads what it has missed

    def book(self, round_: Round, stats: Stats) -> None:
        """This round has ended."""
        self.known.book(self.batch, self.shape, _spent(stats) - self.spent, round_.path, self.since, self.late)


def _spent(stats: Stats) -> float:
    """Seconds of all rounds so far."""
    return sum(much for part, much in stats.seconds.items() if part != "prefill")


class Auto:
    """Proposes what one of several drafters proposes, the same one in different shapes, or nothing.

    Args:
        drafters: they share one memory. A round without a draft asks none of them, unless one has the shape NONE; what
            they have not read by then, the next one to be asked reads as one long round.
        known: of these drafters on this target, from earlier calls.
    """

    def __init__(self, drafters: Iterable[Drafter], known: Known) -> None:
        self.drafters: dict[int, Any] = {drafter.nodes: drafter for drafter in drafters}  # type: ignore[attr-defined]
        self.known = known
        largest = self.drafters[known.shapes[-1]]
        self.features, self.nodes = largest.features, largest.nodes

    def start(self, session: Any, target: Target, prompt: Prompt) -> Any:
        return self.drafters[self.nodes].start(session, target, prompt)

    def propose(self, session: Any, target: Target) -> Draft:
        batch = 1 << (len(session.rows) - 1).bit_length()
        last: Pace | None = session.pace
        stays = last is not None and last.since % self.known.stretch > 0
        shape = last.shape if last is not None and stays else self.known.choose(batch)
        since = last.since + 1 if last is not None and last.shape == shape else 1
        if session.unread is None:
            session.unread = Unread()
        joined = last is not None and max(map(len, session.last.path)) > last.shape  # with rounds that were unread
        late = shape > NONE and (joined or len(session.unread.rounds) > 0)
        session.pace = Pace(self.known, batch, shape, _spent(session.stats), since, late)
        if shape not in self.drafters:
            told = Scores(Categorical(ids=session.last.draft.tokens), session.last.scores.hidden)  # V numbers less
            session.unread.rounds.append(replace(session.last, scores=told))
            return lone(session.pending[:, None])
        session.last, session.unread = session.unread.until(session.last), Unread()
        return self.drafters[shape].propose(session, target)


@dataclass
class Unread:
    """Rounds that the drafter has not read, since it was not asked."""

    rounds: list[Round] = field(default_factory=list)

    def until(self, last: Round) -> Round:
        """These and the one after them, as one long round."""
        return _one([*self.rounds, last])

    def select(self, rows: Tensor) -> Unread:
        return Unread([_one(self.rounds).select(rows)] if self.rounds else [])


def _one(rounds: Sequence[Round]) -> Round:
    """A round and those after it in which nothing was drafted, as if they had been one, with a chain."""
    first, *others = rounds
    if not others:
        return first
    tokens, hidden, more = gather_rows(first.draft.tokens, first.kept), first.scores.hidden, len(others)
    place = first.verdict.count[:, None] + torch.arange(more, device=tokens.device)  # behind what stands in each row
    tokens = pad(tokens, (0, more)).scatter(1, place, torch.cat([round_.draft.tokens for round_ in others], 1))
    if hidden is not None:
        hidden = pad(gather_rows(hidden, first.kept), (0, 0, 0, more))
        new = torch.cat([round_.scores.hidden for round_ in others if round_.scores.hidden is not None], 1)
        hidden = hidden.scatter(1, place[:, :, None].expand_as(new), new)
    last, count, N = others[-1], first.verdict.count + more, tokens.shape[1]
    index = torch.arange(N, device=tokens.device)
    return replace(
        last,
        draft=Draft(tokens, chain(N, tokens.device).expand(len(tokens))),
        scores=Scores(last.scores.law, hidden),
        verdict=replace(last.verdict, stands=index < count[:, None], count=count, last=count - 1),
        kept=index.expand_as(tokens),
        path=tuple(range(n + more) for n in first.counts),
    )
