"""Prompt lookup: propose what followed the last few tokens when they occurred in the text before. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from mmspec.config import chosen
from mmspec.drafters.options import ChainOptions, sized
from mmspec.protocols import PerRow, SessionView, Target, TargetInfo
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Draft, Prompt

_USUAL = ChainOptions()


@dataclass
class Index:
    """Where each n-gram of a text was last followed by something."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0  # tokens indexed so far


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
    shares: ClassVar[bool] = True  # whether it drafts may depend on the clock, see `SpecConfig.auto`

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

    def start(self, session: SessionView, target: Target, prompt: Prompt) -> PerRow[Index]:
        return PerRow([Index() for _ in session.rows])

    def propose(self, session: SessionView, target: Target) -> Draft:
        indexes = session.memory.values
        found = [self._continuation(index, row.tokens) for index, row in zip(indexes, session.rows, strict=True)]
        depth = max(map(len, found))
        chains = [
            [row.tokens[-1], *f, *[NO_TOKEN] * (depth - len(f))] for row, f in zip(session.rows, found, strict=True)
        ]
        tokens = torch.tensor(chains, device=session.pending.device)
        return Draft(tokens, chain(depth + 1, tokens.device).expand(len(chains)))

    def _continuation(self, index: Index, tokens: list[int]) -> list[int]:
        for end in range(
            max(index.read, 1), len(tokens)
        ):  # an n-gram that ends before `end` is followed by tokens[end]
            for n in self.orders:
                if end >= n:
                    index.places[tuple(tokens[end - n : end])] = end
        index.read = len(tokens)
        for n in self.orders:
            at = index.places.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if at is not None:
                return tokens[at : at + self.options.depth]
        return []
