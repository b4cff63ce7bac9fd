"""How far to draft, or not at all: by what rounds cost here and by how much of a draft stands (`auto=True`)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from mmspec.rows import gather_rows
from mmspec.tree import chain, lone
from mmspec.types import Categorical, Draft, Drafter, Prompt, Round, Scores, Target

SAMPLES = 3  # rounds at full depth before anything is decided, and rounds timed at least of each kind
DECAY = 0.97  # of what is known of acceptance, a round
PATIENCE, MOST = 32, 256  # rounds between two looks at what a full draft would give: at first, and at most


class Known:
    """What is known of one drafter on one target.

    A draft of depth d gains 1 + a₁ + … + a_d tokens, aᵢ being the share of rounds in which at least i drafted tokens
    stood; it costs what such rounds took of late, or lies on the line between two depths that were timed. What was
    known of acceptance fades with every round, so that a look at what was not drafted of late counts for much.
    """

    def __init__(self, depths: tuple[int, ...]) -> None:
        self.depths = depths  # ascending; 0 is no draft
        self.tried = [0.0] * (depths[-1] + 1)
        self.stood = [0.0] * (depths[-1] + 1)
        self.costs: dict[tuple[int, int], deque[float]] = {}  # by batch size and depth
        self.idle, self.patience = 0, PATIENCE

    def book(self, batch: int, depth: int, seconds: float, accepted: list[int], late: bool = False) -> None:
        """One round: what it took, and how many drafted tokens stood in each row.

        Args:
            late: the drafter first read what it had missed, so that such rounds take this much at most.
        """
        times = self.costs.setdefault((batch, depth), deque(maxlen=7))
        if not (late and times and seconds >= statistics.median(times)):
            times.append(seconds)
        self.idle = 0 if depth == self.depths[-1] else self.idle + 1
        for i in range(1, self.depths[-1] + 1):
            self.tried[i] = DECAY * self.tried[i] + (i <= depth) * len(accepted)
            self.stood[i] = DECAY * self.stood[i] + sum(i <= min(a, depth) for a in accepted)

    def gain(self, depth: int) -> float:
        """Tokens that a row gets of a round of this depth."""
        return 1 + sum(self.stood[i] / self.tried[i] for i in range(1, depth + 1) if self.tried[i])

    def cost(self, batch: int, depth: int) -> float:
        """Seconds of a round of this depth, once the shallowest and the deepest have been timed."""
        if (batch, depth) in self.costs:
            return statistics.median(self.costs[batch, depth])
        low, high = (statistics.median(self.costs[batch, d]) for d in (self.depths[0], self.depths[-1]))
        return low + (high - low) * depth / self.depths[-1]

    def choose(self, batch: int) -> int:
        """The depth with the most tokens a second; now and then the deepest, where less of it or none is drafted."""
        for depth, least in ((self.depths[-1], SAMPLES), (0, SAMPLES - 1)):
            if len(self.costs.get((batch, depth), ())) < least:
                return depth
        best = max(self.depths, key=lambda depth: self.gain(depth) / self.cost(batch, depth))
        if best == self.depths[-1]:
            self.patience = PATIENCE
        elif self.idle >= self.patience:
            self.patience = min(2 * self.patience, MOST)
            return self.depths[-1]
        return best


class Auto:
    """Proposes what one of several drafters proposes, the same one at different depths, or nothing.

    Args:
        drafters: by depth; they share one memory. What a drafter did not read while nothing was proposed it reads as
            one long round, as soon as it is asked again.
        known: of these drafters on this target, from earlier calls.
    """

    def __init__(self, drafters: Mapping[int, Drafter], known: Known) -> None:
        self.drafters, self.known = drafters, known
        deepest: Any = drafters[max(drafters)]
        self.features, self.nodes = deepest.features, deepest.nodes

    def start(self, session: Any, target: Target, prompt: Prompt) -> Any:
        return self.drafters[self.known.depths[-1]].start(session, target, prompt)

    def propose(self, session: Any, target: Target) -> Draft:
        batch = 1 << (len(session.rows) - 1).bit_length()  # sizes of the same power of two cost about the same
        spent = sum(much for part, much in session.stats.seconds.items() if part != "prefill")
        if session.pace is not None and session.pace[0] == batch:
            _, depth, before, late = session.pace
            self.known.book(batch, depth, spent - before, [count - 1 for count in session.last.counts], late)
        depth = self.known.choose(batch)
        session.pace = (batch, depth, spent, depth > 0 and len(session.behind) > 0)
        if depth == 0:
            told = Scores(Categorical(ids=session.last.draft.tokens), session.last.scores.hidden)  # V numbers less
            session.behind.append(replace(session.last, scores=told))
            return lone(session.pending[:, None])
        unread = [*session.behind, session.last]
        session.last, session.behind = _one(unread[0], unread[1:]), []
        return self.drafters[depth].propose(session, target)


def _one(first: Round, others: Sequence[Round]) -> Round:
    """A round and those after it in which nothing was drafted, as if they had been one, with a chain."""
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
        counts=tuple(n + more for n in first.counts),
    )
