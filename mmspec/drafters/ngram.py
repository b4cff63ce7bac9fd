"""Prompt lookup: propose what followed the last few tokens when they occurred in the text before. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.config import chosen
from mmspec.drafters.options import ChainOptions, sized
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Draft, Prompt, Target, TargetInfo

_USUAL = ChainOptions()


@dataclass
class Index:
    """Per row: where each n-gram was last followed by something."""

    places: list[dict[tuple[int, ...], int]]
    read: list[int]  # tokens indexed so far

    def select(self, rows: Tensor) -> Index:
        chosen = rows.tolist()
        return Index([self.places[i] for i in chosen], [self.read[i] for i in chosen])

    def join(self, other: Index) -> Index:
        return Index(self.places + other.places, self.read + other.read)


@dataclass(frozen=True)
class NgramDrafter:
    """Chains copied from the row's own text, the longest match first (Saxena 2023, prompt lookup decoding).

    Attributes:
        orders: lengths of the n-grams to match, tried in this order.
        options: `depth` is the longest chain proposed.
    """

    orders: tuple[int, ...] = (3, 2, 1)
    options: ChainOptions = _USUAL
    features: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        return self.options.size

    def fit(self, target: TargetInfo, given: Mapping[str, Any]) -> NgramDrafter:
        """Any target will do; where several branches are asked for, a chain of that depth is drafted.

        Raises:
            ValueError: an option of another drafter.
        """
        chosen(_USUAL, given, "the ngram drafter")
        depth = sized(_USUAL, given)["depth"]
        return replace(self, options=ChainOptions(depth, 1, depth + 1))

    def start(self, session: Any, target: Target, prompt: Prompt) -> Index:
        return Index([{} for _ in session.rows], [0 for _ in session.rows])

    def propose(self, session: Any, target: Target) -> Draft:
        found = [self._continuation(session.memory, b, row.tokens) for b, row in enumerate(session.rows)]
        depth = max(map(len, found))
        chains = [
            [row.tokens[-1], *f, *[NO_TOKEN] * (depth - len(f))] for row, f in zip(session.rows, found, strict=True)
        ]
        tokens = torch.tensor(chains, device=session.pending.device)
        return Draft(tokens, chain(depth + 1, tokens.device).expand(len(chains)))

    def _continuation(self, index: Index, b: int, tokens: list[int]) -> list[int]:
        places = index.places[b]
        for end in range(
            max(index.read[b], 1), len(tokens)
        ):  # an n-gram that ends before `end` is followed by tokens[end]
            for n in self.orders:
                if end >= n:
                    places[tuple(tokens[end - n : end])] = end
        index.read[b] = len(tokens)
        for n in self.orders:
            at = places.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if at is not None:
                return tokens[at : at + self.options.depth]
        return []
