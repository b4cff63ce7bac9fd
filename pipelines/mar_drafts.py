"""Who drafts MAR's tokens: the model itself, side by side, or a smaller one, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmspec import paths
from mmspec.pipelines.mar_loop import DRAFTS, Brush, Canvas, fresh


@dataclass(frozen=True)
class Drafted:
    """R tokens drafted in a round, of several pictures, in order of picture and turn.

    Attributes:
        rows, turns: picture and turn of each.
        z: [streams, R, D], what each was drawn from.
        x: [R, C].
        parts: of each number of denoising steps, which tokens have it, and their paths.
        certain: which of them were drawn from the model's own law, so that nothing is to be tested.
    """

    rows: list[int]
    turns: list[int]
    z: Tensor
    x: Tensor
    parts: list[tuple[Tensor, paths.Path]]
    certain: list[bool]

    @cached_property
    def cells(self) -> tuple[Tensor, Tensor]:
        """`rows` and `turns` as tensors [R]."""
        of, at = (torch.tensor(t, device=self.x.device) for t in (self.rows, self.turns))
        return of, at


class Own:
    """Drafts of the model itself: all from what it knew at its last pass, side by side in one chain."""

    def __init__(self, brush: Brush, ahead: int) -> None:
        self.brush, self.ahead = brush, ahead
        self.z = torch.empty(0)  # [streams, B, L, D]
        self.current: list[bool] = []  # whether z knows all tokens that are decided

    def start(self, drawn: Canvas) -> None:
        self.z = self.brush.read(drawn.tokens, drawn.order, drawn.counts, drawn.labels)
        self.current = [True] * len(drawn.counts)

    def propose(self, drawn: Canvas) -> Drafted:
        rows, turns = _ahead(drawn, self.ahead)
        of, at = (torch.tensor(t, device=drawn.order.device) for t in (rows, turns))
        z = self.z[:, of, drawn.order[of, at]]
        parts, x = [], drawn.tokens.new_empty(len(rows), drawn.tokens.shape[2])
        for index in by_steps(self.brush, turns, of.device):
            path = fresh(self.brush, z[:, index], drawn, of[index], at[index], DRAFTS)
            parts.append((index, path))
            x[index] = path.x
        certain = [self.current[b] and turn == drawn.counts[b] for b, turn in zip(rows, turns, strict=True)]
        return Drafted(rows, turns, z, x, parts, certain)

    def known(self, row: int) -> Tensor | None:
        """[streams, L, D] of a picture where it still holds."""
        return self.z[:, row] if self.current[row] else None

    def learn(self, row: int, z: Tensor, current: bool) -> None:
        self.z[:, row] = z
        self.current[row] = current


class Other:
    """Drafts of a smaller model, one token after the other."""

    def __init__(self, brush: Brush, ahead: int) -> None:
        self.brush, self.ahead = brush, ahead

    def start(self, drawn: Canvas) -> None:
        """It reads the pictures anew in every round."""

    def propose(self, drawn: Canvas) -> Drafted:
        rows, turns = _ahead(drawn, self.ahead)
        seen = replace(drawn, tokens=drawn.tokens.clone())
        of, at = (torch.tensor(t, device=drawn.order.device) for t in (rows, turns))
        offset = torch.tensor([turn - drawn.counts[b] for b, turn in zip(rows, turns, strict=True)], device=of.device)
        x, parts, z = drawn.tokens.new_empty(len(rows), drawn.tokens.shape[2]), [], None
        for j in range(int(offset.max()) + 1):
            now = (offset == j).nonzero()[:, 0]
            b, t = of[now], at[now]
            read = self.brush.read(seen.tokens[b], drawn.order[b], t.tolist(), drawn.labels[b])
            chosen = read[:, torch.arange(len(b), device=b.device), drawn.order[b, t]]
            z = chosen.new_empty(len(chosen), len(rows), chosen.shape[2]) if z is None else z
            z[:, now] = chosen
            for some in by_steps(self.brush, t.tolist(), b.device):
                path = fresh(self.brush, chosen[:, some], drawn, b[some], t[some], DRAFTS)
                parts.append((now[some], path))
                x[now[some]] = path.x
            seen.put(b, t, x[now])
        assert z is not None
        return Drafted(rows, turns, z, x, parts, [False] * len(rows))

    def known(self, row: int) -> Tensor | None:
        return None

    def learn(self, row: int, z: Tensor, current: bool) -> None:
        """It does not read what the target knows."""


def _ahead(drawn: Canvas, most: int) -> tuple[list[int], list[int]]:
    """Picture and turn of the next tokens of every picture that lacks some."""
    L = drawn.order.shape[1]
    cells = [(b, turn) for b, n in enumerate(drawn.counts) for turn in range(n, min(L, n + most))]
    return [b for b, _ in cells], [turn for _, turn in cells]


def by_steps(brush: Brush, turns: Sequence[int], device: Any) -> list[Tensor]:
    """Which tokens have as many denoising steps."""
    alike: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        alike.setdefault(brush.law.steps[turn], []).append(i)
    return [torch.tensor(some, device=device) for some in alike.values()]
