"""Trees grown on the host, the likeliest node first, as far as nodes are worth what they cost."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from mmspec.switch import Price

_WORTH = 0.05  # how likely a node has to be, for one row; every row more makes nodes dearer by an eighth of it
_ON_CPU = 0.15  # the same where a node costs a tenth of a forward, and not next to nothing
_SPARE = 0.3  # of that, for nodes that fill a tree up to a round size
_GAIN = 0.25  # tokens that a draft has to promise, or none is made, where no price is known
LEAST = 0.02  # how likely a node has to be where a price says how many are worth it

Node = TypeVar("Node")


class Rates:
    """How often guesses of each kind came true: every token that comes tests one, drafted or not.

    Args:
        doubt: tests that the first guess of a rate is worth.
        latest: tests of a kind after which half of them are forgotten.
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
    """How likely a node of a draft for so many rows has to be; a CPU has little to spare beside one token."""
    return (_ON_CPU if device == "cpu" else _WORTH) * (1 + (rows - 1) / 8)


def filled(size: int) -> int:
    """The next round size, 2ⁿ or 3 · 2ⁿ, so that few shapes come up."""
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power > 2 and size <= power * 3 // 4 else power


def likeliest(
    root: Node, after: Callable[[Node], Iterable[tuple[float, Node]]], depth: int, size: int, least: float,
    price: Price | None = None,
) -> list[tuple[Node, int]]:  # fmt: skip
    """The nodes below a root that a draft wants, each with the place of its parent, the root's being 0.

    A node is as likely as its chance times those of its ancestors. Parents come before their children.

    Args:
        after: what may follow a node, with chances.
        depth: of the longest path.
        size: nodes at most, the root included.
        least: how likely a node has to be.
        price: the tokens that a draft of so many nodes has to gain; of those that do, the draft that gains most for
            its price is chosen.

    Returns:
        Nothing if it all is not worth a draft.
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
    """How many nodes to draft, the root included, of those whose first so many promise a gain; 1: none.

    Only round sizes are weighed, so that few shapes come up, and all nodes together.

    Args:
        promises: tokens that a row gains on average from the first node, the first two, ...; the first is 1.
    """
    sizes = [n for n in range(2, len(promises) + 1) if filled(n) == n or n == len(promises)]
    best = max(sizes, key=lambda n: promises[n - 1] / price(n), default=1)
    return best if promises[best - 1] > price(best) else 1
