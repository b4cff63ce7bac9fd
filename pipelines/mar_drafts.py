"""Who drafts MAR's tokens: the model itself, side by side, or a smaller one, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec import paths
from mmspec.pipelines.mar_loop import DRAFTS, Brush, Canvas, fresh


@dataclass(frozen=True)
class Cells:
    """R places in the order of several pictures, on the host and on the device, in order of picture and turn."""

    rows: list[int]
    turns: list[int]
    of: Tensor  # `rows` and `turns` as tensors [R]
    at: Tensor

    def __len__(self) -> int:
        return len(self.rows)


def cells(rows: list[int], turns: list[int], device: Any) -> Cells:
    return Cells(rows, turns, torch.tensor(rows, device=device), torch.tensor(turns, device=device))


@dataclass(frozen=True)
class Drafted:
    """R tokens drafted in a round.

    Attributes:
        cells: where they belong.
        z: [streams, R, D], what each was drawn from.
        x: [R, C].
        parts: a number of denoising steps, which tokens have it, and their paths.
        certain: which of them were drawn from the model's own law, so that nothing is to be tested.
    """

    cells: Cells
    z: Tensor
    x: Tensor
    parts: list[tuple[int, list[int], paths.Path]]
    certain: list[bool]


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
        here = _ahead(drawn, self.ahead)
        z = self.z[:, here.of, drawn.order[here.of, here.at]]
        x, parts = drawn.tokens.new_empty(len(here), drawn.tokens.shape[2]), []
        for steps, some in by_steps(self.brush, here.turns):
            path = fresh(self.brush, z[:, some], drawn, here.of[some], here.at[some], steps, DRAFTS)
            parts.append((steps, some, path))
            x[some] = path.x
        certain = [self.current[b] and turn == drawn.counts[b] for b, turn in zip(here.rows, here.turns, strict=True)]
        return Drafted(here, z, x, parts, certain)

    def known(self) -> tuple[Tensor, list[int]]:
        """[streams, B, L, D], and of which pictures it still holds."""
        return self.z, [b for b, current in enumerate(self.current) if current]

    def learn(self, z: Tensor, found: dict[int, int], current: list[int]) -> None:
        """Draft from z [streams, M, L, D], where `found` says which is a picture's; which of them know all there is."""
        self.z[:, list(found)] = z[:, list(found.values())]
        for b in found:
            self.current[b] = b in current


class Other:
    """Drafts of a smaller model, one token after the other."""

    def __init__(self, brush: Brush, ahead: int) -> None:
        self.brush, self.ahead = brush, ahead

    def start(self, drawn: Canvas) -> None:
        """It reads the pictures anew in every round."""

    def propose(self, drawn: Canvas) -> Drafted:
        here, seen = _ahead(drawn, self.ahead), replace(drawn, tokens=drawn.tokens.clone())
        x, parts, each, where = drawn.tokens.new_empty(len(here), drawn.tokens.shape[2]), [], [], []
        for j in range(self.ahead):
            now = [i for i, b in enumerate(here.rows) if here.turns[i] == drawn.counts[b] + j]
            if not now:
                break
            b, at, turns = here.of[now], here.at[now], [here.turns[i] for i in now]
            read = self.brush.read(seen.tokens[b], drawn.order[b], turns, drawn.labels[b])
            z = read[:, torch.arange(len(now), device=b.device), drawn.order[b, at]]
            for steps, some in by_steps(self.brush, turns):
                path = fresh(self.brush, z[:, some], drawn, b[some], at[some], steps, DRAFTS)
                own = [now[i] for i in some]
                parts.append((steps, own, path))
                x[own] = path.x
            seen.put(b, at, x[now])
            each.append(z)
            where += now
        back = torch.tensor(where, device=x.device).argsort()
        return Drafted(here, torch.cat(each, 1)[:, back], x, parts, [False] * len(here))


def _ahead(drawn: Canvas, most: int) -> Cells:
    """Where the next tokens of every picture that lacks some belong."""
    L = drawn.order.shape[1]
    found = [(b, turn) for b, n in enumerate(drawn.counts) for turn in range(n, min(L, n + most))]
    return cells([b for b, _ in found], [turn for _, turn in found], drawn.order.device)


def by_steps(brush: Brush, turns: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Each number of denoising steps, and which tokens have it."""
    alike: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        alike.setdefault(brush.law.steps[turn], []).append(i)
    return list(alike.items())
