"""The window of a Jacobi drafter: its options, the layout of its nodes, and the memory of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Self

import torch
from torch import Tensor

from mmspec.config import is_whole, one_of, whole
from mmspec.modes import lasting
from mmspec.tree import chain, from_paths, in_order
from mmspec.types import Round, Tree, join, select

SHARES = {"uniform": (0.0, 0.0), "horizontal": (1.0, 0.0), "vertical": (0.0, 1.0), "mixture": (0.5, 0.5)}  # left, above
NEAR = "neighbours"
INITS = (*SHARES, NEAR)
COUPLINGS = ("none", "maximal", "gumbel")
ALONE = (1, 1)  # one branch on one level: no tree


@dataclass(frozen=True)
class WindowOptions:
    """How the guesses of a window are made and redrawn.

    Attributes:
        window: positions in a round, including the pending token's; 1 drafts nothing.
        init: source of first guesses: "uniform" (any token), "horizontal" (the token to the left), "vertical" (the one
            above), "mixture" (either of these), or "neighbours" ("mixture" if the target has a grid, otherwise
            "horizontal"; the left token if all noise is fixed beforehand, where the other is no better).
        coupling: how a guess is redrawn from the target's new distribution: "none", "maximal" or "gumbel".
        proactive: (K, D): the next D − 1 positions get a tree with K branches per node (K, D ≥ 2); (1, 1): no tree.
    """

    window: int = 16
    init: str = NEAR
    coupling: str = "maximal"
    proactive: tuple[int, int] = ALONE

    def __post_init__(self) -> None:
        whole("window", self.window)
        one_of("init", self.init, INITS)
        one_of("coupling", self.coupling, COUPLINGS)
        pair = self.proactive
        if pair != ALONE and not (isinstance(pair, tuple) and len(pair) == 2 and all(is_whole(n, 2) for n in pair)):
            raise ValueError(f"proactive must be (branches, levels), both whole numbers ≥ 2, or None; got {pair!r}")
        if self.window < pair[1]:
            raise ValueError(
                f"proactive={pair} needs window ≥ {pair[1]}, got window={self.window}; raise the window or use fewer "
                "levels"
            )


USUAL = WindowOptions()


@dataclass
class WindowMemory:
    """The state of rows between rounds; C = window − 1 positions are guessed in each round."""

    decided: Tensor  # [B, G], the latest decided tokens, NO_TOKEN where there are fewer; G: width of the grid
    ends: Tensor  # [B], largest number of tokens after the prompt
    init: str
    q: Tensor | None = None  # [B, C, V], log q of the guesses on the main path; None: they were not drawn

    def append(self, last: Round) -> None:
        """Append the tokens that a round decided: the accepted ones, then the drawn one."""
        token, count = last.acceptance.next_token[:, None], last.acceptance.count[:, None]
        path = torch.cat([last.draft.tokens.gather(1, last.kept)[:, 1:], token], 1).scatter(1, count - 1, token)
        here = count + torch.arange(self.decided.shape[1], device=path.device)
        self.decided = torch.cat([self.decided, path], 1).gather(1, here)

    def select(self, rows: Tensor) -> Self:
        return select(self, rows)

    def join(self, other: Self) -> Self:
        q = self.q if self.q is not None else other.q
        if q is None:
            return join(self, other, {})
        none = [q.new_zeros(len(m.ends), *q.shape[1:]) if m.q is None else m.q for m in (self, other)]  # never read
        return join(replace(self, q=none[0]), replace(other, q=none[1]), {})


@dataclass(frozen=True)
class WindowLayout:
    """The nodes of all drafts of a session: `levels` levels of a tree with `ranks` branches per node, then a chain."""

    tree: Tree  # [1, N]
    line: Tensor  # [N, C + 1]: for each node its first descendant on each level; if it has none, the root's
    entry: Tensor  # [N], a node's index in the list: root, (level, rank) in the tree, the chain below its first leaf
    ranks: int = 1
    levels: int = 0


@lru_cache(maxsize=16)
@lasting()
def layout(window: int, proactive: tuple[int, int], device: torch.device) -> WindowLayout:
    """The layout of a chain; with proactive = (K, D) each node above level D − 1 has K children."""
    nodes = torch.arange(window, device=device)
    if proactive == ALONE:
        return WindowLayout(chain(window, device), nodes.expand(window, window), nodes)
    K, levels = proactive[0], proactive[1] - 1
    paths = [*product(range(K), repeat=levels), (0,) * (window - 1)]
    place = {path: n for n, path in enumerate(in_order(paths))}
    main, lines, entry = [place[(0,) * d] for d in range(window)], [], []
    for path in place:
        d = len(path)
        below = [place[down] for more in range(1, window - d) if (down := path + (0,) * more) in place]
        lines.append([*main[: d + 1], *below, *main[d + 1 + len(below) :]])
        entry.append((d - 1) * K + path[-1] + 1 if 0 < d <= levels else (levels * (K - 1) + d) * (d > 0))
    line, at = (torch.tensor(table, device=device) for table in (lines, entry))
    return WindowLayout(from_paths(paths, device)[0], line, at, K, levels)
