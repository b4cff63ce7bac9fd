"""Session: the state of one generation, row by row. Only `commit`, `retire` and `admit` change its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.ragged_cache import closed_ranks
from mmspec.rules import Rule, exact
from mmspec.statistics import Stats
from mmspec.types import NO_TOKEN, Acceptance, Categorical, Draft, Round, Scores

_PER_ROW = ("pending", "emitted", "seeds", "spent")  # tensors [B] of a session


@dataclass
class Row:
    """One sequence: its tokens and when it ends."""

    tokens: list[int]  # the prompt and everything decided so far
    start: int  # length of the prompt
    limit: int  # length at which the row ends
    seed: int  # of this row's noise
    eos: frozenset[int] = frozenset()
    stop: Callable[[list[int], int], int | None] | None = None  # any further stopping criterion: called with all tokens
    # and the number of new ones, it returns the length at which the row should have ended, or None
    index: int = 0  # position in the call that the row belongs to
    rule: Rule = exact  # decides which drafted tokens to accept
    request: Any = None  # the call's settings for the target: how logits become a distribution, arguments of forwards
    text: Any = None  # cache key of the prompt, for a target with a prefix cache
    done: bool = False
    spent: float = 0.0  # total-variation cost of a relaxed rule; set when the row retires

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append decided tokens, up to the one that ends the row; returns those that were appended.

        Raises RuntimeError: the target's distribution cannot be sampled; stock `generate` raises, too, when it samples.
        """
        valid, begin = list(takewhile(lambda token: token >= 0, tokens)), len(self.tokens)
        ends = (i for i, x in enumerate(valid, 1) if x in self.eos or begin + i >= self.limit)
        end = next(ends, None)
        self.tokens += valid[:end]
        length = self.stop(self.tokens, len(self.tokens) - begin) if valid and self.stop is not None else None
        if length is not None:
            del self.tokens[length:]
        self.done = end is not None or length is not None
        if len(valid) < len(tokens) and not self.done:
            raise RuntimeError(
                f"no token can be drawn after token {len(self.tokens)} of row {self.index}: its logits hold nan or "
                "inf, or every token is forbidden. If the model overflows in float16, run it in bfloat16 or float32"
            )
        return self.tokens[begin:]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Group:
    """The part of some rows that a request reads; a Session has the same attributes."""

    rows: list[Row]
    emitted: Tensor  # [B], tokens decided after the prompt
    seeds: Tensor  # [B]


class Session:
    """The active rows, with the target's cache and the drafter's memory for exactly these rows."""

    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self.rows = rows
        self.cache: Any = None  # Rows: the target's own state
        self.memory: Any = None  # Rows: the drafter's own state
        self.last: Round = None  # type: ignore[assignment]  # before the prefill, and once all rows have ended
        self.watched = False  # whether rounds record which rows had a draft rejected, in `Round.refused`
        self.pending = torch.zeros(len(rows), dtype=torch.long, device=device)  # [B] decided, not yet in the cache
        self.emitted = torch.zeros(len(rows), dtype=torch.long, device=device)  # [B] tokens decided after the prompt
        self.spent = torch.zeros(len(rows), dtype=ops.widest(device), device=device)  # [B] cost of the rule so far
        self.seeds = torch.tensor([row.seed for row in rows], device=device)
        self.stats = Stats(lossless=self.rule.lossless)

    @property
    def rule(self) -> Rule:
        """The acceptance rule, which all rows of a session share."""
        return self.rows[0].rule if self.rows else exact

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to one part of the round in `stats.seconds`."""
        began = time.perf_counter()
        yield
        self.stats.seconds[part] = self.stats.seconds.get(part, 0.0) + time.perf_counter() - began

    def noise(self, draft: Draft, distribution: Categorical) -> Tensor | None:
        """Uniform numbers [B, N], fixed by each row's seed and by the position of the token drawn after each node; None
        if the distribution is a point mass, where nothing is drawn."""
        if distribution.is_point:
            return None
        noise: Tensor = dispatch.uniform(self.seeds[:, None], self.emitted[:, None] + draft.tree.depth)
        return noise

    def commit(self, draft: Draft, scores: Scores, acceptance: Acceptance) -> Round:
        """Read the acceptance (the round's only copy to the host), append the rows' new tokens, set the pending one."""
        order, N, more = draft.tree.depth, draft.tree.size, []  # in `order` the accepted nodes come first
        if not draft.tree.is_chain:
            order = (~acceptance.accepted).to(torch.uint8).argsort(dim=1, stable=True)
            more = [order]
        if self.watched:
            rejected = (draft.tree.parents == acceptance.last[:, None]) & (draft.tokens != NO_TOKEN)
            more.append(rejected[:, 1:].any(1, keepdim=True))
        read = [acceptance.count[:, None], acceptance.next_token[:, None], draft.tokens.gather(1, order), *more]
        lines = torch.cat(read, 1).tolist()
        path = tuple(range(line[0]) if draft.tree.is_chain else line[2 + N :][: line[0]] for line in lines)
        decided = ([*line[3 : 2 + line[0]], line[1]] for line in lines)  # accepted below the root, and the drawn one
        new = tuple(tuple(row.take(tokens)) for row, tokens in zip(self.rows, decided, strict=True))
        proposed = tuple(sum(token != NO_TOKEN for token in line[3 : 2 + N]) for line in lines)
        refused = tuple(bool(self.watched and line[-1]) for line in lines)
        self.last = Round(draft, scores, acceptance, order[:, : max(map(len, path))], path, new, proposed, refused)
        self.pending = acceptance.next_token
        self.emitted = self.emitted + acceptance.count
        self.spent = self.spent if acceptance.tv_cost is None else self.spent + acceptance.tv_cost
        self.stats.tokens += sum(map(len, new))
        return self.last

    def count(self, round_: Round) -> None:
        """Add a round, other than the prefill's, to the stats."""
        self.stats.rounds += 1
        for counts in zip(round_.counts, round_.new, round_.proposed, strict=True):
            self.stats.count(*counts)

    def group(self, index: Tensor) -> Group:
        """The part of some rows that logits depend on."""
        rows = [self.rows[i] for i in index.tolist()]
        return Group(rows, self.emitted[index], self.seeds[index])

    def retire(self) -> None:
        """Remove the rows that have ended; the last of the other rows take their places."""
        if not any(row.done for row in self.rows):
            return
        for row, spent in zip(self.rows, self.spent.tolist(), strict=True):
            if row.done:
                row.spent = spent
                self.stats.spent += spent
                self.stats.charges[row.index] = spent
        self.select(closed_ranks([i for i, row in enumerate(self.rows) if not row.done]))

    def select(self, keep: list[int]) -> None:
        """Keep some rows, by index."""
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self.last = self.cache = self.memory = None  # type: ignore[assignment]
            return
        index = torch.tensor(keep, device=self.pending.device)
        for name in _PER_ROW:
            setattr(self, name, getattr(self, name)[index])
        self.last = self.last.select(index) if self.last is not None else None
        self.cache = self.cache.select(index)
        self.memory = self.memory.select(index) if self.memory is not None else None

    def admit(self, other: Session) -> None:
        """Add the rows of another session of the same target, drafter and rule; `other` must not be used any more."""
        if not self.rows:
            self.rows, self.cache, self.memory, self.last = other.rows, other.cache, other.memory, other.last
            for name in _PER_ROW:
                setattr(self, name, getattr(other, name))
        else:
            self.rows = self.rows + other.rows
            for name in _PER_ROW:
                setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
            self.cache = self.cache.join(other.cache)
            self.memory = self.memory.join(other.memory) if self.memory is not None else None
            last = self.last
            self.last = last.join(other.last) if last is not None and other.last is not None else None
        self.stats.add(other.stats)


@contextmanager
def holding(session: Session, memory: Any) -> Iterator[None]:
    """Make `memory` the session's drafter memory inside the `with` block, for a drafter that wraps another."""
    outer, session.memory = session.memory, memory
    try:
        yield
    finally:
        session.memory = outer
