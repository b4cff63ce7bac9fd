"""Prompt lookup: propose what followed an earlier occurrence of the last few tokens in the row's text. No weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from mmspec.config import Options
from mmspec.drafters.likely import Rates, worthwhile
from mmspec.drafters.shape import Sizes
from mmspec.protocols import PerRow, SessionView, Target, TargetInfo
from mmspec.switch import Prices
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Draft, Prompt

ORDERS = (3, 2, 1)
_USUAL = Sizes(7, 1, 8)
_RUNS = 5  # number of classes of runs of right guesses: 0, 1, …, and _RUNS − 1 or more
_DOUBT = 4.0  # weight of the prior of a rate, in tests
_FIRST = 0.4  # that prior
_LATEST = 200  # tests of a rate after which their weight is halved


def _hits() -> Rates:
    return Rates(_DOUBT, _LATEST)


def _kind(order: int, run: int) -> tuple[int, int]:
    """The class of a guess: the length of its n-gram, and the number of right guesses in a row before it."""
    return order, min(run, _RUNS - 1)


@dataclass
class Index:
    """The last position of each n-gram in a text, and how often the token that followed it came again.

    Attributes:
        hits: rates by `_kind`.
        orders: lengths of the n-grams to match, tried in this order.
    """

    hits: Rates = field(default_factory=_hits)
    orders: tuple[int, ...] = ORDERS
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0  # tokens indexed so far
    run: int = 0  # number of right guesses in a row

    def follow(self, tokens: list[int], depth: int) -> tuple[list[int], list[float]]:
        """At most `depth` tokens that followed the longest match of the end of a text, and the expected number of
        tokens that a row gains from none of them, the first, the first two, … The text's tokens since the last call
        test what would have been guessed for them."""
        answered = self.read  # 0 at the prompt, which tests nothing
        for end in range(max(self.read, 1), len(tokens)):
            if answered:
                self._test(tokens, end)
            for n in self.orders:  # an n-gram that ends before `end` is followed by tokens[end]
                if end >= n:
                    self.places[tuple(tokens[end - n : end])] = end
        self.read = len(tokens)
        order, at = self._match(tokens, len(tokens))
        copied, promises, likely = tokens[at : at + depth] if order else [], [1.0], 1.0
        for step in range(len(copied)):
            likely *= self.hits.of(_kind(min(order + step, max(self.orders)), self.run + step), _FIRST)
            promises.append(promises[-1] + likely)
        return copied, promises

    def _test(self, tokens: list[int], end: int) -> None:
        """Compare tokens[end] with what would have been guessed for it."""
        order, at = self._match(tokens, end)
        if order:
            true = tokens[at] == tokens[end]
            self.hits.test(_kind(order, self.run), true)
            self.run = self.run + 1 if true else 0
        else:
            self.run = 0

    def _match(self, tokens: list[int], end: int) -> tuple[int, int]:
        """The longest n-gram before `end` that occurred earlier: its length (0: none), and the position after it."""
        for n in self.orders:
            at = self.places.get(tuple(tokens[end - n : end])) if end >= n else None
            if at is not None:
                return n, at
        return 0, 0


@dataclass(frozen=True)
class NgramDrafter:
    """Chains copied from the row's own text, the longest match first (Saxena 2023, prompt lookup decoding).

    Attributes:
        orders: lengths of the n-grams to match, tried in this order.
        options: `depth` is the longest chain proposed.
        prices: measured costs of drafts, which limit the length of chains; None: chains are as long as possible.
    """

    orders: tuple[int, ...] = ORDERS
    options: Sizes = _USUAL
    features: tuple[int, ...] = ()
    shares: ClassVar[bool] = True  # its drafts depend on other rows and calls
    hits: Rates = field(default_factory=_hits, repr=False, compare=False)  # rates by `_kind`
    prices: Prices | None = field(default=None, repr=False, compare=False)

    @property
    def nodes(self) -> int:
        return self.options.size

    def fit(self, target: TargetInfo, given: Options) -> NgramDrafter:
        """Fits any target; with width > 1 it still drafts a chain of that depth.

        Raises ValueError: an option of another drafter.
        """
        depth = _USUAL.with_(given, "the ngram drafter").depth
        return replace(self, options=Sizes(depth, 1, depth + 1), hits=_hits())

    def start(self, session: SessionView[PerRow[Index]], target: Target, prompt: Prompt) -> PerRow[Index]:
        return PerRow([Index(self.hits, self.orders) for _ in session.rows])

    def propose(self, session: SessionView[PerRow[Index]], target: Target) -> Draft:
        price = None if self.prices is None else self.prices.of(len(session.rows), session.pending.device.type)
        copies = []
        for index, row in zip(session.memory.values, session.rows, strict=True):
            copied, promises = index.follow(row.tokens, self.options.depth)
            copies.append(copied if price is None else copied[: worthwhile(promises, price) - 1])
        depth = max(map(len, copies))
        chains = [
            [row.tokens[-1], *f, *[NO_TOKEN] * (depth - len(f))] for row, f in zip(session.rows, copies, strict=True)
        ]
        tokens = torch.tensor(chains, device=session.pending.device)
        return Draft(tokens, chain(depth + 1, tokens.device).expand(len(chains)))
