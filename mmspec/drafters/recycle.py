"""Token recycling: what the target last found likeliest after each token, grown to a tree. No weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.config import chosen
from mmspec.drafters.likely import likeliest, worth
from mmspec.drafters.options import ChainOptions, sized
from mmspec.modes import lasting
from mmspec.protocols import PerRow, SessionView, Target, TargetInfo
from mmspec.tree import chain, from_paths, in_order, lone
from mmspec.types import LIKELIEST, NO_TOKEN, RANKS, Draft, Prompt, Round, Tree

_FIRST = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02)  # how often the token of each rank comes, before any was tested
_DOUBT = 8.0  # tests that these are worth
_LATEST = 200  # tests of a rank after which half of them are forgotten
_FADES = 0.995  # what tests are worth after a round that did not draft their rank, so that it is tried again
_KEEPS = 8  # rounds that go by until a shape is chosen anew

Path = tuple[int, ...]


@dataclass(frozen=True)
class RecycleOptions(ChainOptions):
    """How far a draft goes.

    Attributes:
        depth: longest drafted path, in tokens (≥ 1).
        width: how many of the successors of a token are drafted at most, up to 8; 1 drafts a chain.
        size: nodes sent to the target in a round at most, the root included.
    """

    depth: int = 6
    width: int = RANKS
    size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > RANKS:
            raise ValueError(f"width must be at most {RANKS}, as many successors as are remembered; got {self.width}")


_USUAL = RecycleOptions()


@dataclass(frozen=True)
class Shape:
    """A static tree by ranks: node 0 is the root, a child of rank r the r-th likeliest successor of its parent."""

    tree: Tree  # [1, N]
    levels: tuple[tuple[Tensor, Tensor], ...]  # of the nodes of each depth: their parents, their ranks
    below: tuple[dict[int, int], ...]  # of each node: child → its rank


@lru_cache(maxsize=64)
@lasting()
def shaped(paths: tuple[Path, ...], device: torch.device) -> Shape:
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
    return Shape(tree, tuple(levels), below)


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
        self.tests = [[0.0, 0.0] for _ in _FIRST]  # by rank: how often its token came, and was drafted
        self._shapes: dict[Any, tuple[int, tuple[Path, ...]]] = {}  # with the rounds that it has been in use

    def learn(self, tokens: Tensor, ranked: Tensor) -> None:
        """Remember the likeliest tokens [B, N, RANKS] after the tokens [B, N] of scored nodes.

        NO_TOKEN is written to a spare row behind the last token, which stays empty.
        """
        hole = (tokens < 0) | (tokens >= len(self.table) - 1)
        self.table[tokens.masked_fill(hole, len(self.table) - 1)] = ranked.to(self.table)
        self.table[-1] = NO_TOKEN

    def tested(self, shape: Shape, path: Sequence[int]) -> None:
        """Which of the nodes below those of an accepted path came true."""
        for node, onward in zip(path, (*path[1:], 0), strict=True):
            for child, rank in shape.below[node].items():
                test = self.tests[rank]
                test[0] += child == onward
                test[1] += 1
                if test[1] >= _LATEST:
                    test[:] = [half / 2 for half in test]

    def rate(self, rank: int) -> float:
        """How often the token of a rank comes where it is drafted."""
        true, tests = self.tests[rank]
        return (true + _DOUBT * _FIRST[rank]) / (tests + _DOUBT)

    def shape(self, options: RecycleOptions, least: float) -> tuple[Path, ...]:
        """Paths of the nodes that are likely enough; none where they are not worth a draft."""
        used, paths = self._shapes.get((options, least), (_KEEPS, ()))
        if used == _KEEPS or not paths:
            rates = [(self.rate(rank), rank) for rank in range(min(options.width, self.table.shape[1]))]

            def after(path: Path) -> list[tuple[float, Path]]:
                return [(rate, (*path, rank)) for rate, rank in rates]

            root: Path = ()
            used, paths = 0, tuple(path for path, _ in likeliest(root, after, options.depth, options.size, least))
        drafted = {path[-1] for path in paths}
        for rank, test in enumerate(self.tests):
            if rank not in drafted:
                test[:] = [_FADES * one for one in test]
        self._shapes[options, least] = used + 1, paths
        return paths

    def filled(self, shape: Shape, pending: Tensor) -> Tensor:
        """Tokens [B, N] of a shape below pending tokens [B]; NO_TOKEN where nothing is known yet."""
        tokens = pending[:, None]
        for parents, ranks in shape.levels:
            tokens = torch.cat([tokens, self.table[tokens[:, parents], ranks].long()], 1)
        return tokens


@dataclass(frozen=True)
class RecycleDrafter:
    """Trees of the tokens that the target found likeliest when it last read a token (Luo et al. 2024, arXiv
    2408.08696).

    The successors lie on the target's device, drafts are gathered from them there, and nothing is read by the host.
    The tree is static and the same for all rows; every few rounds it is chosen anew, best-first by how often tokens of
    each rank came true in this run, and where none is likely enough nothing is drafted.

    Attributes:
        successors: what was learnt so far; `fit` begins anew.
    """

    options: RecycleOptions = _USUAL
    features: tuple[int, ...] = (LIKELIEST,)
    shares: ClassVar[bool] = True
    successors: Successors | None = field(default=None, repr=False, compare=False)

    @property
    def nodes(self) -> int:
        return self.options.size

    def fit(self, target: TargetInfo, given: Mapping[str, Any]) -> RecycleDrafter:
        """Any target will do.

        Raises:
            ValueError: an option of another drafter, or more successors than are remembered.
        """
        options = replace(chosen(_USUAL, given, "the recycle drafter"), **sized(_USUAL, given))
        return replace(self, options=options, successors=Successors(target.vocab, target.device))

    def start(self, session: SessionView, target: Target, prompt: Prompt) -> PerRow[Shape | None]:
        """Of each row, the shape that its last draft had; None: nothing was drafted for it."""
        return PerRow([None] * len(session.rows))

    def propose(self, session: SessionView, target: Target) -> Draft:
        known, memory, pending = self.successors, session.memory, session.pending
        assert known is not None
        with known.lock:
            self._learn(known, session.last, memory.values)
            paths = known.shape(self.options, worth(len(session.rows), pending.device.type))
            shape = shaped(paths, pending.device) if paths else None
            memory.values = [shape] * len(session.rows)
            if shape is None:
                return lone(pending[:, None])
            return Draft(known.filled(shape, pending), shape.tree.expand(len(pending)))

    def _learn(self, known: Successors, last: Round, shapes: list[Shape | None]) -> None:
        assert last.scores.likeliest is not None
        known.learn(last.draft.tokens, last.scores.likeliest)
        for shape, path, proposed in zip(shapes, last.path, last.proposed, strict=True):
            if shape is not None and proposed:
                known.tested(shape, path)
