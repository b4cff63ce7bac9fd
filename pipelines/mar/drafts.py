"""Who drafts MAR's tokens: the model itself, side by side, or a smaller one, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.continuous import denoising
from mmspec.pipelines.mar.loop import DRAFTS, MarRunner, MarState, fresh


@dataclass(frozen=True)
class Cells:
    """R places in the order of several pictures, on the host and on the device, in order of picture and turn."""

    rows: list[int]
    turns: list[int]
    of: Tensor  # `rows` and `turns` as tensors [R]
    at: Tensor

    def __len__(self) -> int:
        return len(self.rows)


def cells(rows: list[int], turns: list[int], device: torch.device) -> Cells:
    return Cells(rows, turns, *indices(device, rows, turns))


def indices(device: torch.device, *lists: Sequence[int]) -> tuple[Tensor, ...]:
    """Lists of numbers as tensors on the device, which take one copy together; a list as an index takes its own."""
    packed = torch.tensor([n for each in lists for n in each], dtype=torch.int64, device=device)
    return packed.split([len(each) for each in lists])


@dataclass
class MarDraft:
    """A drafted token."""

    row: int  # where it belongs
    turn: int
    z: Tensor  # [streams, D], what it was drawn from
    certain: bool = False  # that was the model's own distribution, so that nothing is to be tested
    path: denoising.Path | None = None  # as it was drawn; None: not yet

    @property
    def drawn(self) -> denoising.Path:
        assert self.path is not None, f"the token at turn {self.turn} of picture {self.row} was not drafted"
        return self.path


def places(drafts: Sequence[MarDraft], device: torch.device) -> Cells:
    return cells([draft.row for draft in drafts], [draft.turn for draft in drafts], device)


class SelfDrafter:
    """Drafts of the model itself: all from what it knew at its last pass, side by side in one chain.

    That pass may lack the last token, which was rejected in it and is drawn anew in the same chain. This is exact all
    the same: a draft may have any distribution that is known when it is tested. Its noise and its uniform number belong
    to its place, and no decision has used them yet, since drafts after a rejected one are never tested. So a draft may
    even be drawn again from the same noise.
    """

    def __init__(self, runner: MarRunner, ahead: int) -> None:
        self.runner, self.ahead = runner, ahead
        self.z = torch.empty(0)  # [streams, B, L, D]
        self.current: list[bool] = []  # whether z knows all tokens that are decided

    def start(self, drawn: MarState) -> None:
        self.z = self.runner.read(drawn.tokens, drawn.order, drawn.counts, drawn.labels)
        self.current = [True] * len(drawn.counts)

    def wanted(self, drawn: MarState) -> list[MarDraft]:
        """The next tokens of every picture, their paths still to be drawn."""
        here = _ahead(drawn, self.ahead)
        z = self.z[:, here.of, drawn.order[here.of, here.at]].unbind(1)
        return [
            MarDraft(b, turn, of, certain=self.current[b] and turn == drawn.counts[b])
            for b, turn, of in zip(here.rows, here.turns, z, strict=True)
        ]

    def propose(self, drawn: MarState, drafts: list[MarDraft]) -> list[MarDraft]:
        """Those that it wanted; they are drawn."""
        return drafts

    def known(self) -> tuple[Tensor, list[int]]:
        """[streams, B, L, D], and of which pictures it still holds."""
        return self.z, [b for b, current in enumerate(self.current) if current]

    def learn(self, z: Tensor, source_of: dict[int, int], current: list[int]) -> None:
        """MarDraft from z [streams, M, L, D], where `source_of` says which is a picture's; which of them know all there
        is."""
        rows, source = indices(z.device, list(source_of), list(source_of.values()))
        self.z[:, rows] = z[:, source]
        for b in source_of:
            self.current[b] = b in current


class SmallerDrafter:
    """Drafts of a smaller model, one token after the other."""

    def __init__(self, runner: MarRunner, ahead: int) -> None:
        self.runner, self.ahead = runner, ahead

    def start(self, drawn: MarState) -> None:
        """It reads the pictures anew in every round."""

    def wanted(self, drawn: MarState) -> list[MarDraft]:
        """None, before all that is decided is drawn."""
        return []

    def propose(self, drawn: MarState, drafts: list[MarDraft]) -> list[MarDraft]:
        """The next tokens of every picture."""
        here, seen, drafted = _ahead(drawn, self.ahead), replace(drawn, tokens=drawn.tokens.clone()), {}
        for j in range(self.ahead):
            now = [i for i, b in enumerate(here.rows) if here.turns[i] == drawn.counts[b] + j]
            if not now:
                break
            turns = [here.turns[i] for i in now]
            alike = by_steps(self.runner, turns)
            these, *several = indices(here.of.device, now, *(some for _, some in alike))
            b, at = here.of[these], here.at[these]
            read = self.runner.read(seen.tokens[b], drawn.order[b], turns, drawn.labels[b])
            z = read[:, torch.arange(len(now), device=b.device), drawn.order[b, at]]
            for (steps, some), index in zip(alike, several, strict=True):
                path = fresh(self.runner, z[:, index], drawn, b[index], at[index], steps, DRAFTS)
                seen.put(b[index], at[index], path.x)
                for k, i in enumerate(some):
                    drafted[now[i]] = MarDraft(here.rows[now[i]], turns[i], z[:, i], path=path.take(slice(k, k + 1)))
        return [drafted[i] for i in range(len(here))]


def _ahead(drawn: MarState, most: int) -> Cells:
    """Where the next tokens of every picture that lacks some belong."""
    L = drawn.order.shape[1]
    ahead = [(b, turn) for b, n in enumerate(drawn.counts) for turn in range(n, min(L, n + most))]
    return cells([b for b, _ in ahead], [turn for _, turn in ahead], drawn.order.device)


def by_steps(runner: MarRunner, turns: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Each number of denoising steps, and which tokens have it."""
    alike: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        alike.setdefault(runner.distribution.steps[turn], []).append(i)
    return list(alike.items())
