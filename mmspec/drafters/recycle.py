"""Token recycling: what the target last found likeliest after each token, grown to a tree. No weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
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

_FIRST = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02)  # how often the token of each rank comes, before any was tested
_DOUBT = 8.0  # tests that these are worth
_LATEST = 200  # tests of a rank after which half of them are forgotten
_FADES = 0.995  # what tests are worth after a round that did not draft their rank, so that it is tried again
_STREAKS = 5  # how often the likeliest came in a row before is told apart up to here, less one
_KEEPS = 8  # rounds that go by until a shape is chosen anew

Path = tuple[int, ...]


@dataclass(frozen=True)
class RecycleOptions(Sizes):
    """How far a draft goes.

    Attributes:
        width: how many of the successors of a token are drafted at most, up to 8; 1 drafts a chain.
    """

    depth: int = 8
    width: int = RANKS
    size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > RANKS:
            raise ValueError(f"width must be at most {RANKS}, as many successors as are remembered; got {self.width}")


_USUAL = RecycleOptions()


@dataclass(frozen=True)
class RankTree:
    """A static tree by ranks: node 0 is the root, a child of rank r the r-th likeliest successor of its parent."""

    tree: Tree  # [1, N]
    levels: tuple[tuple[Tensor, Tensor], ...]  # of the nodes of each depth: their parents, their ranks
    below: tuple[dict[int, int], ...]  # of each node: child → its rank


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
    """Of every token what the target last found likeliest after it, for all rows and calls, in 32 bytes a token.

    Every node that the target has scored is learnt from, refused ones, too. Calls of several threads take turns.

    Args:
        vocab: V, tokens that are known.
    """

    @lasting()
    def __init__(self, vocab: int, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.table = torch.full((vocab + 1, min(RANKS, vocab)), NO_TOKEN, dtype=torch.int32, device=device)
        # by how often the likeliest token came in a row before, and by rank: how often its token came, and was drafted
        self.rates = Rates(_DOUBT, _LATEST)
        # with the rounds that it has been in use
        self._shapes: dict[tuple[RecycleOptions, float, int], tuple[int, tuple[Path, ...]]] = {}

    def learn(self, tokens: Tensor, ranked: Tensor) -> None:
        """Remember the likeliest tokens [B, N, RANKS] after the tokens [B, N] of scored nodes.

        NO_TOKEN is written to a spare row behind the last token, which stays empty.
        """
        hole = (tokens < 0) | (tokens >= len(self.table) - 1)
        self.table[tokens.masked_fill(hole, len(self.table) - 1)] = ranked.to(self.table)
        self.table[-1] = NO_TOKEN

    def read(self, words: Tensor) -> None:
        """Take what followed the words [B, T] of prompts for the likeliest after them; NO_TOKEN where there is none."""
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
        place = torch.where(same.any(1), same.int().argmax(1), ranks[-1])[:, None]  # of it, or of what it replaces
        moved = torch.where(ranks <= place, torch.cat([new, self.table[:, :-1]], 1), self.table)
        self.table.copy_(torch.where(new >= 0, moved, self.table))
        self.table[-1] = NO_TOKEN

    def tested(self, shape: RankTree, path: Sequence[int], streak: int = 0) -> int | None:
        """Which of the nodes below those of an accepted path came true.

        Returns:
            How often the likeliest token came in a row now; None: it was not drafted below the last node.
        """
        for node, onward in zip(path, (*path[1:], 0), strict=True):
            for child, rank in shape.below[node].items():
                self.rates.test(_kind(streak, rank), child == onward)
            if onward:
                streak = 0 if shape.below[node][onward] else streak + 1
        return 0 if 0 in shape.below[path[-1]].values() else None

    def compared(self, known: Sequence[int], token: int, streak: int) -> int:
        """A token against what was known to follow, where nothing of it was drafted; the streak after it."""
        for rank, one in enumerate(known):
            if one != NO_TOKEN:
                self.rates.test(_kind(streak, rank), one == token)
        return streak + 1 if known[0] == token else 0

    def rate(self, rank: int, streak: int = 0) -> float:
        """How often the token of a rank comes where it is drafted."""
        return self.rates.of(_kind(streak, rank), _FIRST[rank])

    def shape(
        self, options: RecycleOptions, least: float, streak: int = 0, price: Price | None = None
    ) -> tuple[Path, ...]:
        """Paths of the nodes that are likely enough; none where they are not worth a draft."""
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
        """Tokens [B, N] of a shape below pending tokens [B]; NO_TOKEN where nothing is known yet."""
        tokens = pending[:, None]
        for parents, ranks in shape.levels:
            tokens = torch.cat([tokens, self.table[tokens[:, parents], ranks].long()], 1)
        return tokens


@dataclass(frozen=True)
class _Place:
    """Of a row: the shape of its last draft, if it had one, and how often the likeliest token came in a row."""

    shape: RankTree | None = None
    streak: int = 0


@dataclass(frozen=True)
class RecycleDrafter:
    """Trees of the tokens that the target found likeliest when it last read a token (Luo et al. 2024, arXiv
    2408.08696).

    The successors lie on the target's device, drafts are gathered from them there, and nothing is read by the host.
    The tree is static and the same for all rows; every few rounds it is chosen anew, best-first by how often tokens of
    each rank came true in this run, and where none is likely enough nothing is drafted.

    Attributes:
        successors: what was learnt so far; `fit` begins anew.
        prices: what drafts cost, where that is measured; None: what they cost usually.
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
        """Any target will do.

        Raises:
            ValueError: an option of another drafter, or more successors than are remembered.
        """
        options = _USUAL.with_(given, "the recycle drafter")
        return replace(self, options=options, successors=Successors(target.vocab, target.device))

    def start(self, session: SessionView[PerRow[_Place]], target: Target, prompt: Prompt) -> PerRow[_Place]:
        """Read the prompts' text tokens; those of pictures are left out."""
        known = self.successors
        assert known is not None
        with known.lock:
            known.read(torch.where((prompt.visual == 0) & prompt.valid, prompt.ids, NO_TOKEN))
        return PerRow([_Place() for _ in session.rows])

    def propose(self, session: SessionView[PerRow[_Place]], target: Target) -> Draft:
        known, places, pending = self.successors, session.memory.values, session.pending
        assert known is not None
        rows, device = len(session.rows), pending.device.type
        price = None if self.prices is None else self.prices.of(rows, device)
        least = worth(rows, device) if price is None else LEAST
        with known.lock:
            streaks = self._learn(known, session.last, places, [row.tokens[-1] for row in session.rows])
            paths = known.shape(self.options, least, median_low(streaks), price)
            shape = shaped(paths, pending.device) if paths else None
            session.memory.values = [_Place(shape, streak) for streak in streaks]
            if shape is None:
                return lone(pending[:, None])
            return Draft(known.filled(shape, pending), shape.tree.expand(len(pending)))

    def _learn(self, known: Successors, last: Round, places: list[_Place], pending: list[int]) -> list[int]:
        """The last round's tokens and tests; of each row, how often the likeliest token came in a row."""
        assert last.scores.likeliest is not None
        tokens, before = last.draft.tokens, None
        if self.prices is not None and tokens.device.type == "cpu":  # known before; a GPU would have to be waited for
            ends = torch.tensor([path[-1] for path in last.path])
            before = known.table[tokens.gather(1, ends[:, None])[:, 0]].tolist()
        known.learn(tokens, last.scores.likeliest)
        streaks = []
        for row, (place, path, proposed) in enumerate(zip(places, last.path, last.proposed, strict=True)):
            streak: int | None = None
            now = place.streak
            if place.shape is not None and proposed and path[-1] < place.shape.tree.size:  # else others drafted
                streak = known.tested(place.shape, path, now)
                now = _onward(place.shape, path, now)
            if streak is None:
                streak = now if before is None else known.compared(before[row], pending[row], now)
            streaks.append(streak)
        return streaks


def _kind(streak: int, rank: int) -> tuple[int, int]:
    return min(streak, _STREAKS - 1), rank


def _onward(shape: RankTree, path: Sequence[int], streak: int) -> int:
    """The streak at the last node of a path."""
    for node, onward in pairwise(path):
        streak = 0 if shape.below[node][onward] else streak + 1
    return streak
