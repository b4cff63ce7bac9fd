"""Best-first growth of draft trees on the host, limited by what nodes cost, and rates of right guesses."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from mmspec.switch import Price

_WORTH = 0.05  # least probability of a node for one row; every further row adds an eighth of it
_ON_CPU = 0.15  # the same on a CPU, where a node costs a tenth of a forward instead of almost nothing
_SPARE = 0.3  # factor of that for nodes that fill a tree up to a round size
_GAIN = 0.25  # expected gain in tokens below which nothing is drafted, if no price is known
LEAST = 0.02  # least probability of a node if a price decides how many are worth it

Node = TypeVar("Node")


class Rates:
    """How often guesses of each kind were right, whether they were drafted or not.

    Args:
        doubt: weight of the prior of a rate, in tests.
        latest: tests of a kind after which their weight is halved.
    """

    def __init__(self, doubt: float, latest: int) -> None:
        self.doubt, self.latest = doubt, latest
        self.tests: defaultdict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def of(self, kind: tuple[int, ...], first: float) -> float:
        true, tests = self.tests[kind]
        return (true + self.doubt * first) / (tests + self.doubt)

    def test(self, kind: tuple[int, ...], true: bool) -> None:
        test = self.tests[kind]
        test[0] += true
        test[1] += 1
        if test[1] >= self.latest:
            test[:] = [half / 2 for half in test]


def worth(rows: int, device: str = "cuda") -> float:
    """The least probability of a node of a draft for this many rows; higher on a CPU, where nodes cost more."""
    return (_ON_CPU if device == "cpu" else _WORTH) * (1 + (rows - 1) / 8)


def filled(size: int) -> int:
    """The next round size, 2ⁿ or 3 · 2ⁿ, so that there are few shapes."""
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power > 2 and size <= power * 3 // 4 else power


def likeliest(
    root: Node, after: Callable[[Node], Iterable[tuple[float, Node]]], depth: int, size: int, least: float,
    price: Price | None = None,
) -> list[tuple[Node, int]]:  # fmt: skip
    """The likeliest nodes below a root, each with the index of its parent (the root is 0).

    The probability of a node is its chance times those of its ancestors. Parents come before their children.

    Args:
        after: the possible children of a node, with their chances.
        depth: of the longest path.
        size: largest number of nodes, the root included.
        least: least probability of a node.
        price: tokens that a draft must gain, by its number of nodes; of the drafts that do, the one with the largest
            gain for its price is chosen.

    Returns:
        Empty if no draft is worth its cost.
    """
    nodes: list[tuple[Node, int]] = []
    heap = [(-1.0, 0, 0, 0, root)]  # likelihood, order, depth, parent, node
    order, promised, promises = 0, 0.0, list[float]()
    while heap and len(nodes) < size and (-heap[0][0] >= least or filled(len(nodes)) != len(nodes)):
        likely, _, level, parent, node = heapq.heappop(heap)
        nodes.append((node, parent))
        promised -= likely
        promises.append(promised)
        for chance, child in after(node) if level < depth else ():
            if -likely * chance >= _SPARE * least:
                order += 1
                heapq.heappush(heap, (likely * chance, order, level + 1, len(nodes) - 1, child))
    if price is not None:
        return nodes[1 : worthwhile(promises, price)]
    return nodes[1:] if promised - 1 >= _GAIN else []


def worthwhile(promises: Sequence[float], price: Price) -> int:
    """The number of nodes to draft, the root included, with the largest gain for its price; 1: draft nothing.

    Only round sizes and the full size are compared, so that there are few shapes.

    Args:
        promises: expected tokens that a row gains from the first node, the first two, …; the first is 1.
    """
    sizes = [n for n in range(2, len(promises) + 1) if filled(n) == n or n == len(promises)]
    best = max(sizes, key=lambda n: promises[n - 1] / price(n), default=1)
    return best if promises[best - 1] > price(best) else 1
