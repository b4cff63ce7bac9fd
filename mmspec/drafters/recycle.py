"""Token recycling: a tree of the target's latest top tokens after each token. No weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median_low
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.config import Options
from mmspec.drafters.likely import LEAST, Rates, likeliest, worth
from mmspec.drafters.shape import Sizes
from mmspec.modes import lasting
from mmspec.protocols import PerRow, SessionView, Target, TargetInfo
from mmspec.switch import Price, Prices
from mmspec.tree import chain, from_paths, in_order, lone
from mmspec.types import LIKELIEST, NO_TOKEN, RANKS, Draft, Prompt, Round, Tree

_FIRST = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02)  # prior of the probability of each rank's token
_DOUBT = 8.0  # weight of the prior, in tests
_LATEST = 200  # tests of a rank after which their weight is halved
_FADES = 0.995  # factor of a rank's tests after a round that did not draft it, so that it is tried again
_STREAKS = 5  # number of classes of streaks (top tokens that came in a row): 0, 1, …, and _STREAKS − 1 or more
_KEEPS = 8  # rounds until a shape is chosen again

Path = tuple[int, ...]


@dataclass(frozen=True)
class RecycleOptions(Sizes):
    """The sizes of a draft.

    Attributes:
        width: largest number of drafted successors of a token, up to 8; 1 drafts a chain.
    """

    depth: int = 8
    width: int = RANKS
    size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > RANKS:
            raise ValueError(f"width must be at most {RANKS}, the number of stored successors; got {self.width}")


_USUAL = RecycleOptions()


@dataclass(frozen=True)
class RankTree:
    """A static tree by ranks: node 0 is the root; a child of rank r is the r-th likeliest successor of its parent."""

    tree: Tree  # [1, N]
    levels: tuple[tuple[Tensor, Tensor], ...]  # for each depth: parents and ranks of its nodes
    below: tuple[dict[int, int], ...]  # for each node: child → rank


@lru_cache(maxsize=64)
@lasting()
def shaped(paths: tuple[Path, ...], device: torch.device) -> RankTree:
    """The tree of paths of ranks."""
    order = in_order(paths)
    place = {path: node for node, path in enumerate(order)}
    tree, _ = from_paths(paths, device)
    if len(order) == 1 + len(order[-1]):
        tree = chain(len(order), device)
    levels = []
    for depth in range(1, 1 + len(order[-1])):
        here = [path for path in order if len(path) == depth]
        parents, ranks = [place[path[:-1]] for path in here], [path[-1] for path in here]
        levels.append((torch.tensor(parents, device=device), torch.tensor(ranks, device=device)))
    below = tuple({place[path]: path[-1] for path in order[1:] if path[:-1] == above} for above in order)
    return RankTree(tree, tuple(levels), below)


class Successors:
    """The target's latest top tokens after each token, for all rows and calls, in 32 bytes per token.

    It learns from every node that the target scored, also from rejected ones. A lock serialises threads.

    Args:
        vocab: V, size of the vocabulary.
    """

    @lasting()
    def __init__(self, vocab: int, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.table = torch.full((vocab + 1, min(RANKS, vocab)), NO_TOKEN, dtype=torch.int32, device=device)
        # by streak and rank: how often the rank's token came
        self.rates = Rates(_DOUBT, _LATEST)
        # (rounds in use, paths)
        self._shapes: dict[tuple[RecycleOptions, float, int], tuple[int, tuple[Path, ...]]] = {}

    def learn(self, tokens: Tensor, ranked: Tensor) -> None:
        """Remember the likeliest tokens [B, N, RANKS] after the tokens [B, N] of scored nodes.

        Entries of NO_TOKEN go to a spare row after the last token, which is then cleared.
        """
        hole = (tokens < 0) | (tokens >= len(self.table) - 1)
        self.table[tokens.masked_fill(hole, len(self.table) - 1)] = ranked.to(self.table)
        self.table[-1] = NO_TOKEN

    def read(self, words: Tensor) -> None:
        """Store what followed each of the tokens [B, T] of prompts as its likeliest successor; NO_TOKEN is skipped."""
        spare, device = len(self.table) - 1, words.device
        before, after = words[:, :-1].flatten(), words[:, 1:].flatten()
        if not len(before):
            return
        hole = (before < 0) | (after < 0) | (before >= spare) | (after >= spare)
        order = torch.arange(len(before), device=device)
        latest = torch.full((spare + 1,), -1, device=device)
        latest.scatter_reduce_(0, before.masked_fill(hole, spare), order, "amax")
        new = torch.where(latest >= 0, after[latest.clamp(min=0)], NO_TOKEN).to(self.table)[:, None]
        same = self.table == new
        ranks = torch.arange(self.table.shape[1], device=device)
        place = torch.where(same.any(1), same.int().argmax(1), ranks[-1])[:, None]  # its rank, or the one it replaces
        moved = torch.where(ranks <= place, torch.cat([new, self.table[:, :-1]], 1), self.table)
        self.table.copy_(torch.where(new >= 0, moved, self.table))
        self.table[-1] = NO_TOKEN

    def tested(self, shape: RankTree, path: Sequence[int], streak: int = 0) -> tuple[int, bool]:
        """Record which of the nodes below those of an accepted path were accepted; returns the streak at its last node,
        and whether the likeliest token was drafted below that, which ends the streak."""
        for node, child_taken in zip(path, (*path[1:], 0), strict=True):
            for child, rank in shape.below[node].items():
                self.rates.test(_kind(streak, rank), child == child_taken)
            if child_taken:
                streak = 0 if shape.below[node][child_taken] else streak + 1
        return streak, 0 in shape.below[path[-1]].values()

    def compared(self, successors: Sequence[int], token: int, streak: int) -> int:
        """Test a token against the stored successors of the one before it, if none was drafted; returns the streak."""
        for rank, one in enumerate(successors):
            if one != NO_TOKEN:
                self.rates.test(_kind(streak, rank), one == token)
        return streak + 1 if successors[0] == token else 0

    def rate(self, rank: int, streak: int = 0) -> float:
        """The probability of a rank's token."""
        return self.rates.of(_kind(streak, rank), _FIRST[rank])

    def shape(
        self, options: RecycleOptions, least: float, streak: int = 0, price: Price | None = None
    ) -> tuple[Path, ...]:
        """Paths of the nodes that are likely enough; empty if no draft is worth its cost."""
        streak = min(streak, _STREAKS - 1)
        key = (options, least, streak)
        used, paths = self._shapes.get(key, (_KEEPS, ()))
        if used == _KEEPS or not paths:
            ranks = range(min(options.width, self.table.shape[1]))
            rates = [[(self.rate(rank, before), rank) for rank in ranks] for before in range(_STREAKS)]

            def after(path: Path) -> list[tuple[float, Path]]:
                first = next((back for back, rank in enumerate(reversed(path)) if rank), streak + len(path))
                return [(rate, (*path, rank)) for rate, rank in rates[min(first, _STREAKS - 1)]]

            root: Path = ()
            nodes = likeliest(root, after, options.depth, options.size, least, price)
            used, paths = 0, tuple(path for path, _ in nodes)
        drafted = {path[-1] for path in paths}
        for rank in {*range(len(_FIRST))} - drafted:
            test = self.rates.tests[streak, rank]
            test[:] = [_FADES * one for one in test]
        self._shapes[key] = used + 1, paths
        return paths

    def filled(self, shape: RankTree, pending: Tensor) -> Tensor:
        """Tokens [B, N] of a shape below pending tokens [B]; NO_TOKEN where no successor is stored yet."""
        tokens = pending[:, None]
        for parents, ranks in shape.levels:
            tokens = torch.cat([tokens, self.table[tokens[:, parents], ranks].long()], 1)
        return tokens


@dataclass(frozen=True)
class _Place:
    """State of a row: the shape of its last draft, if any, and its streak (top tokens that came in a row)."""

    shape: RankTree | None = None
    streak: int = 0


@dataclass(frozen=True)
class RecycleDrafter:
    """Trees of the target's top tokens after its latest reading of each token (Luo et al. 2024, arXiv 2408.08696).

    The successors are on the target's device, and drafts are gathered there without a copy to the host. The tree is
    static and the same for all rows; every few rounds it is chosen again, best-first by how often tokens of each rank
    were right in this run. If none is likely enough, nothing is drafted.

    Attributes:
        successors: learnt so far; `fit` starts with none.
        prices: measured costs of drafts; None: the usual costs.
    """

    options: RecycleOptions = _USUAL
    features: tuple[int, ...] = (LIKELIEST,)
    shares: ClassVar[bool] = True
    successors: Successors | None = field(default=None, repr=False, compare=False)
    prices: Prices | None = field(default=None, repr=False, compare=False)

    @property
    def nodes(self) -> int:
        return self.options.size

    def fit(self, target: TargetInfo, given: Options) -> RecycleDrafter:
        """Fits any target.

        Raises ValueError: an option of another drafter, or a width above the number of stored successors.
        """
        options = _USUAL.with_(given, "the recycle drafter")
        return replace(self, options=options, successors=Successors(target.vocab, target.device))

    def start(self, session: SessionView[PerRow[_Place]], target: Target, prompt: Prompt) -> PerRow[_Place]:
        """Read the prompts' text tokens, without those of pictures."""
        successors = self.successors
        assert successors is not None
        with successors.lock:
            successors.read(torch.where((prompt.visual == 0) & prompt.valid, prompt.ids, NO_TOKEN))
        return PerRow([_Place() for _ in session.rows])

    def propose(self, session: SessionView[PerRow[_Place]], target: Target) -> Draft:
        successors, places, pending = self.successors, session.memory.values, session.pending
        assert successors is not None
        rows, device = len(session.rows), pending.device.type
        price = None if self.prices is None else self.prices.of(rows, device)
        least = worth(rows, device) if price is None else LEAST
        with successors.lock:
            streaks = self._learn(successors, session.last, places, [row.tokens[-1] for row in session.rows])
            paths = successors.shape(self.options, least, median_low(streaks), price)
            shape = shaped(paths, pending.device) if paths else None
            session.memory.values = [_Place(shape, streak) for streak in streaks]
            if shape is None:
                return lone(pending[:, None])
            return Draft(successors.filled(shape, pending), shape.tree.expand(len(pending)))

    def _learn(self, successors: Successors, last: Round, places: list[_Place], pending: list[int]) -> list[int]:
        """Learn from the last round's tokens, and test the drafted ones; returns the streak of each row."""
        assert last.scores.likeliest is not None
        tokens, before = last.draft.tokens, None
        if self.prices is not None and tokens.device.type == "cpu":  # on a GPU this would wait for the device
            ends = torch.tensor([path[-1] for path in last.path], device=tokens.device)
            before = successors.table[tokens.gather(1, ends[:, None])[:, 0]].tolist()
        successors.learn(tokens, last.scores.likeliest)
        streaks = []
        for row, (place, path, proposed) in enumerate(zip(places, last.path, last.proposed, strict=True)):
            streak, over = place.streak, False
            if place.shape is not None and proposed and path[-1] < place.shape.tree.size:  # else it was another draft
                streak, over = successors.tested(place.shape, path, streak)
            if not over and before is not None:
                streak = successors.compared(before[row], pending[row], streak)
            streaks.append(0 if over else streak)
        return streaks


def _kind(streak: int, rank: int) -> tuple[int, int]:
    return min(streak, _STREAKS - 1), rank
