"""Statistics of generation: rounds, tokens, acceptance and time, summed over rounds and calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

SHOWN = {  # of a drafter's statistics: what the text calls them, and the unit there
    "rows": ("tokens in its KV cache", 1),
    "visual rows before": ("visual tokens", 1),
    "visual rows": ("after compression", 1),
    "memory bytes": ("MiB of keys and values", 2**20),
}


@dataclass
class Stats:
    """Statistics, summed over rounds and calls; `str` gives them in one line.

    τ has two meanings in papers, and both are here: `tokens_per_target_call` counts the token that the target adds in
    each round, `accepted_draft_tokens_per_call` does not.

    Attributes:
        rounds: propose → verify → accept; each is one forward of the target, however many rows take part.
        tokens: generated, over all rows, including the first one of each row (from the prefill).
        row_rounds: rounds, counted once for every row that took part.
        gained: tokens generated in rounds (without the prefill's).
        drafted: draft tokens.
        accepted: those of the gained tokens that were drafted.
        accepted_by_depth: depth → how often a row accepted at least this many tokens in a round.
        lossless: whether every row has the target's own distribution.
        spent: total-variation cost of relaxed rules, summed over all rows that have ended.
        charges: the same for each row of the last call, by its index.
        seconds: wall time by part: draft, verify, accept, commit, prefill. On a GPU, kernels run asynchronously, so the
            time of one part may appear in the next.
        drafter: sums over the prompts that a feature drafter read: prompts, cached rows, visual rows before and after
            compression, memory bytes (the keys and values of the prompts' rows), and statistics of its method.
        prefix: with `prefix_cache`, sums over the prompts that could be cached: prompts, tokens, and reused tokens,
            which were not read again.
        read_whole: with `prefix_cache`, reason why prompts were neither cached nor resumed → their number.
        kept_bytes: size of the prefix cache after the last call.
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
    prefix: dict[str, float] = field(default_factory=dict)
    read_whole: Counter[str] = field(default_factory=Counter)
    kept_bytes: int = 0

    @property
    def target_calls(self) -> int:
        """Forward passes of the target after the prefill."""
        return self.rounds

    @property
    def accepted_draft_tokens_per_call(self) -> float:
        """τ without the bonus token: accepted draft tokens per row and target call."""
        return self.accepted / self.row_rounds if self.row_rounds else 0.0

    @property
    def tokens_per_target_call(self) -> float:
        """τ with the bonus token: tokens that a row gains per target call; 1 in plain decoding."""
        return self.gained / self.row_rounds if self.row_rounds else 0.0

    def acceptance(self, depth: int) -> float:
        """Share of a row's rounds in which at least `depth` draft tokens were accepted."""
        return self.accepted_by_depth[depth] / self.row_rounds if self.row_rounds else 0.0

    def count(self, nodes: int, new: Sequence[int], proposed: int) -> None:
        """Add one row of a round: number of accepted nodes (with the root), its new tokens, number of draft tokens."""
        accepted = min(nodes - 1, len(new))  # a row may end among its accepted tokens
        self.row_rounds += 1
        self.drafted += proposed
        self.gained += len(new)
        self.accepted += accepted
        self.accepted_by_depth.update(range(1, accepted + 1))

    def add(self, other: Stats) -> None:
        for name in ("rounds", "tokens", "row_rounds", "gained", "drafted", "accepted", "spent"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lossless = self.lossless and other.lossless
        self.accepted_by_depth.update(other.accepted_by_depth)
        self.charges = dict(other.charges) or self.charges
        self.read_whole.update(other.read_whole)
        self.kept_bytes = other.kept_bytes or self.kept_bytes
        sums = ((self.seconds, other.seconds), (self.drafter, other.drafter), (self.prefix, other.prefix))
        for mine, others in sums:
            for name, value in others.items():
                mine[name] = mine.get(name, 0.0) + value

    def __str__(self) -> str:
        spent = sum(self.seconds.values()) or 1.0
        share = ", ".join(f"{name} {100 * s / spent:.0f} %" for name, s in sorted(self.seconds.items()))
        depths = " ".join(f"{self.acceptance(d):.2f}" for d in sorted(self.accepted_by_depth))
        relaxed = "" if self.lossless else f"; relaxed, charged {self.spent:.3f} in total variation"
        return (
            f"{self.tokens} tokens in {self.rounds} target calls; per row, without the prompts' first: "
            f"tokens_per_target_call {self.tokens_per_target_call:.2f}, accepted_draft_tokens_per_call "
            f"{self.accepted_draft_tokens_per_call:.2f}; accepted by depth: {depths or 'none'}; time: {share}{relaxed}"
            f"{self._read()}{self._reused()}"
        )

    def _read(self) -> str:
        """The drafter's statistics per prompt."""
        prompts = self.drafter.get("prompts", 0)
        told = [(*SHOWN.get(name, (name, 1)), value) for name, value in self.drafter.items() if name != "prompts"]
        each = ", ".join(f"{value / prompts / unit:.4g} {name}" for name, unit, value in told)
        return f"; the drafter's prompt: {each}" if prompts else ""

    def _reused(self) -> str:
        """The share of prompt tokens that was not read again, and why some prompts were read whole."""
        share = self.prefix.get("reused tokens", 0) / (self.prefix.get("tokens", 0) or 1)
        parts = [f"{100 * share:.0f} % of {self.prefix['tokens']:.0f} tokens not read again"] if self.prefix else []
        parts += [f"{count} read whole: {why}" for why, count in self.read_whole.items()]
        return f"; prompts: {', '.join(parts)}; {self.kept_bytes / 2**20:.1f} MiB kept" if parts else ""
