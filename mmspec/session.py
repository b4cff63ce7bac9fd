"""The Session: all that changes during one generation, row by row. Only `commit`, `retire` and `admit` write rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.rules import Rule
from mmspec.types import HOLE, Draft, Law, Round, Scores, Verdict

R = TypeVar("R")
_PER_ROW = ("pending", "emitted", "seeds", "spent")  # tensors [B] of a session


@dataclass
class Row:
    """One sequence: its tokens and when it ends."""

    tokens: list[int]  # the prompt and everything decided so far
    start: int  # length of the prompt
    limit: int  # length at which the row ends
    seed: int  # of this row's noise
    eos: frozenset[int] = frozenset()
    stop: Callable[[list[int]], bool] | None = None  # any further condition, asked after each token
    index: int = 0  # place in the call that it came with
    done: bool = False
    spent: float = 0.0  # distance from the target's law that a relaxed rule was charged; set when the row is let go

    def push(self, token: int) -> bool:
        """Append one decided token; true once the row has ended."""
        self.tokens.append(token)
        self.done = (
            token in self.eos or len(self.tokens) >= self.limit or (self.stop is not None and self.stop(self.tokens))
        )
        return self.done

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.start


@dataclass
class Stats:
    """What happened, summed over rounds and calls; printed, it is one line.

    τ has two meanings in papers, and both are here: `tokens_per_target_call` counts the token that the target adds in
    each round, `accepted_draft_tokens_per_call` does not.

    Attributes:
        rounds: propose → verify → accept; each is one forward of the target, however many rows take part.
        tokens: generated, over all rows, the first one of each row (from the prefill) included.
        row_rounds: rounds, counted once for every row that took part.
        gained: tokens that came of the rounds.
        drafted: tokens proposed.
        accepted: of the gained ones, those that were drafted.
        accepted_by_depth: depth → rows that accepted at least so many tokens in a round.
        lossless: whether every row has the target's own law.
        spent: distance in total variation that relaxed rules were charged, over all rows that have ended.
        charges: the same for each row of the last call, by its place.
        seconds: wall time by part: draft, verify, accept, commit, prefill. On a GPU work is launched without waiting
            for it, so that a part's time may show in the next one.
        drafter: what a feature drafter made of the prompts that it read, summed up: prompts, rows that it keeps, visual
            rows before and after compression, memory bytes (the keys and values of the prompts' rows), and what
            its method adds.
    """

    rounds: int = 0
    tokens: int = 0
    row_rounds: int = 0
    gained: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    lossless: bool = True
    spent: float = 0.0
    charges: dict[int, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    drafter: dict[str, float] = field(default_factory=dict)

    @property
    def target_calls(self) -> int:
        """Forward passes of the target after the prefill."""
        return self.rounds

    @property
    def accepted_draft_tokens_per_call(self) -> float:
        """τ without the bonus token: drafted tokens kept, per row and target call."""
        return self.accepted / self.row_rounds if self.row_rounds else 0.0

    @property
    def tokens_per_target_call(self) -> float:
        """τ with the bonus token: what a row gains per target call; plain decoding has 1."""
        return self.gained / self.row_rounds if self.row_rounds else 0.0

    def acceptance(self, depth: int) -> float:
        """Share of a row's rounds in which at least `depth` drafted tokens were kept."""
        return self.accepted_by_depth[depth] / self.row_rounds if self.row_rounds else 0.0

    def add(self, other: Stats) -> None:
        for name in ("rounds", "tokens", "row_rounds", "gained", "drafted", "accepted", "spent"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lossless = self.lossless and other.lossless
        self.accepted_by_depth.update(other.accepted_by_depth)
        self.charges = dict(other.charges) or self.charges
        for mine, others in ((self.seconds, other.seconds), (self.drafter, other.drafter)):
            for name, much in others.items():
                mine[name] = mine.get(name, 0.0) + much

    def __str__(self) -> str:
        spent = sum(self.seconds.values()) or 1.0
        share = ", ".join(f"{name} {100 * s / spent:.0f} %" for name, s in sorted(self.seconds.items()))
        depths = " ".join(f"{self.acceptance(d):.2f}" for d in sorted(self.accepted_by_depth))
        bent = "" if self.lossless else f"; relaxed, charged {self.spent:.3f} in total variation"
        return (
            f"{self.tokens} tokens in {self.rounds} target calls; tokens_per_target_call "
            f"{self.tokens_per_target_call:.2f}, accepted_draft_tokens_per_call "
            f"{self.accepted_draft_tokens_per_call:.2f}; accepted by depth: {depths or 'none'}; time: {share}{bent}"
            f"{self._read()}"
        )

    def _read(self) -> str:
        """What the drafter made of a prompt, on average."""
        prompts = self.drafter.get("prompts", 0)
        each = ", ".join(f"{much / prompts:.4g} {name}" for name, much in self.drafter.items() if name != "prompts")
        return f"; the drafter's prompt: {each}" if prompts else ""


class Session:
    """Rows under way, with the target's cache and the drafter's memory for exactly these rows."""

    def __init__(self, rows: list[Row], cache: Any, device: torch.device, rule: Rule) -> None:
        self.rows = rows
        self.cache = cache  # Rows: the target's own state
        self.memory: Any = None  # Rows: the drafter's own state
        self.rule = rule
        self.last: Round | None = None
        self.pending = torch.zeros(len(rows), dtype=torch.long, device=device)  # [B] decided, not yet in the cache
        self.emitted = torch.zeros(len(rows), dtype=torch.long, device=device)  # [B] tokens decided after the prompt
        self.spent = torch.zeros(len(rows), dtype=ops.widest(device), device=device)  # [B] charged by a rule so far
        self.seeds = torch.tensor([row.seed for row in rows], device=device)
        self.stats = Stats(lossless=rule.lossless)

    def timed(self, part: str, call: Callable[..., R], *args: Any) -> R:
        """Call, and book the time on one part of the round."""
        began = time.perf_counter()
        result = call(*args)
        self.stats.seconds[part] = self.stats.seconds.get(part, 0.0) + time.perf_counter() - began
        return result

    def noise(self, draft: Draft, law: Law) -> Tensor | None:
        """Uniform numbers [B, N], fixed by each row's seed and by the position of the token drawn after each node; None
        where the law is a point mass and nothing is drawn."""
        return None if law.is_point else dispatch.uniform(self.seeds[:, None], self.emitted[:, None] + draft.tree.depth)

    def commit(self, draft: Draft, scores: Scores, verdict: Verdict) -> Round:
        """Take what stands: the one read of a round by the host, the rows' new tokens, the next pending token."""
        order, N, more = draft.tree.depth, draft.tree.size, []  # what stands, in path order, comes first
        if not draft.tree.is_chain:
            order = (~verdict.stands).to(torch.uint8).argsort(dim=1, stable=True)
            more = [order]
        read = [verdict.count[:, None], verdict.token[:, None], draft.tokens.gather(1, order), *more]
        lines = torch.cat(read, 1).tolist()
        path = tuple(line[2 + N :][: line[0]] if more else range(line[0]) for line in lines)
        new = tuple(tuple(self._push(row, line)) for row, line in zip(self.rows, lines, strict=True))
        proposed = tuple(sum(token != HOLE for token in line[3 : 2 + N]) for line in lines)
        self.last = Round(draft, scores, verdict, order[:, : max(map(len, path))], path, new, proposed)
        self.pending = verdict.token
        self.emitted = self.emitted + verdict.count
        self.spent = self.spent if verdict.spent is None else self.spent + verdict.spent
        self.stats.tokens += sum(map(len, new))
        return self.last

    @staticmethod
    def _push(row: Row, line: list[int]) -> list[int]:
        count, token, _root, *path = line
        new = []
        for x in [*path[: count - 1], token]:
            new.append(x)
            if row.push(x):
                break
        return new

    def count(self, round_: Round) -> None:
        """Book a round after the prefill."""
        stats = self.stats
        stats.rounds += 1
        stats.row_rounds += len(round_.counts)
        stats.drafted += sum(round_.proposed)
        for count, new in zip(round_.counts, round_.new, strict=True):
            accepted = min(count - 1, len(new))  # a row may end among its accepted tokens
            stats.gained += len(new)
            stats.accepted += accepted
            stats.accepted_by_depth.update(range(1, accepted + 1))

    def retire(self) -> None:
        """Let the rows go that have ended; the others close ranks."""
        if not any(row.done for row in self.rows):
            return
        for row, spent in zip(self.rows, self.spent.tolist(), strict=True):
            if row.done:
                row.spent = spent
                self.stats.spent += spent
                self.stats.charges[row.index] = spent
        self.select([i for i, row in enumerate(self.rows) if not row.done])

    def select(self, keep: list[int]) -> None:
        """Keep some rows, by index."""
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self.last = self.cache = self.memory = None
            return
        index = torch.tensor(keep, device=self.pending.device)
        for name in _PER_ROW:
            setattr(self, name, getattr(self, name)[index])
        self.last = self.last.select(index) if self.last is not None else None
        self.cache = self.cache.select(index)
        self.memory = self.memory.select(index) if self.memory is not None else None

    def admit(self, other: Session) -> None:
        """Take in the rows of another session of the same target and drafter; `other` must not be used any more."""
        if not self.rows:
            self.__dict__.update({k: v for k, v in other.__dict__.items() if k != "stats"})
        else:
            self.rows = self.rows + other.rows
            for name in _PER_ROW:
                setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
            self.cache = self.cache.join(other.cache)
            self.memory = self.memory.join(other.memory) if self.memory is not None else None
            last = self.last
            self.last = last.join(other.last) if last is not None and other.last is not None else None
        self.stats.add(other.stats)
