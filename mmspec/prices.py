"""What a round costs by the nodes that it reads, in rounds without a draft: measured, for drafters that weigh it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

Price = Callable[[int], float]

KEPT = 9  # rounds of a size whose median counts, the latest
SURE = 3  # of them, before they count
STALE = 64  # rounds until the oldest measured round of every size is forgotten, so that one that was disturbed fades
MARGIN = 0.1  # what a draft has to promise beyond its price, as a share of it
DOUBT = 0.5  # the same while what was drafted lately did not pay


def _usual(nodes: int, device: str) -> float:
    """Before anything was measured: a CPU takes longer with every node, a GPU hardly."""
    if nodes == 1:
        return 1.0
    return 1.1 + 0.06 * nodes if device == "cpu" else 1.0 + 0.01 * nodes


class Prices:
    """Seconds of rounds by batch size and nodes, and what follows for the price of a draft."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._rounds = 0
        self.margin = MARGIN

    def book(self, batch: int, nodes: int, seconds: float) -> None:
        """One round; where nothing was drafted, `nodes` is 1."""
        self._seconds[batch, nodes].append(seconds)
        self._rounds += 1
        if self._rounds % STALE == 0:
            for (_, size), held in self._seconds.items():
                if size > 1 and held:
                    held.popleft()

    def cost(self, batch: int, nodes: int, device: str = "cpu") -> float:
        """How many rounds without a draft a round of so many nodes takes; what was not measured follows the usual
        costs, from the size next to it."""
        plain = list(self._seconds[batch, 1])
        if nodes == 1 or len(plain) < SURE:
            return _usual(nodes, device)
        known = {
            size: median(list(held)) / median(plain)
            for (rows, size), held in list(self._seconds.items())
            if rows == batch and size > 1 and len(held) >= SURE
        }
        if nodes in known or not known:
            return known.get(nodes, _usual(nodes, device))
        sizes = sorted(known)
        place = bisect_left(sizes, nodes)
        if 0 < place < len(sizes):
            low, high = sizes[place - 1], sizes[place]
            return known[low] + (known[high] - known[low]) * (nodes - low) / (high - low)
        near = sizes[min(place, len(sizes) - 1)]
        return known[near] * _usual(nodes, device) / _usual(near, device)

    def of(self, batch: int, device: str) -> Price:
        """The price of a draft by its nodes: the tokens that a row has to gain from it."""
        costs: dict[int, float] = {}

        def price(nodes: int) -> float:
            if nodes not in costs:
                costs[nodes] = self.cost(batch, nodes, device) * (1 + self.margin * (nodes > 1))
            return costs[nodes]

        return price
