"""The drafters of MAR's tokens: the model itself, which drafts in parallel, or a smaller one, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.continuous import denoising
from mmspec.pipelines.mar.loop import DRAFTS, MarRunner, MarState, fresh


@dataclass(frozen=True)
class Cells:
    """R tokens of several images by image and turn, sorted by these, on the host and on the device."""

    rows: list[int]
    turns: list[int]
    of: Tensor  # `rows` and `turns` as tensors [R]
    at: Tensor

    def __len__(self) -> int:
        return len(self.rows)


def cells(rows: list[int], turns: list[int], device: torch.device) -> Cells:
    return Cells(rows, turns, *indices(device, rows, turns))


def indices(device: torch.device, *lists: Sequence[int]) -> tuple[Tensor, ...]:
    """Lists of numbers as tensors on the device, in one transfer; indexing by lists would take one for each."""
    packed = torch.tensor([n for each in lists for n in each], dtype=torch.int64, device=device)
    return packed.split([len(each) for each in lists])


@dataclass
class MarDraft:
    """A drafted token."""

    row: int  # the image
    turn: int
    z: Tensor  # [streams, D], the conditioning that it is drawn with
    certain: bool = False  # whether that is the model's own up-to-date conditioning, so that no test is needed
    path: denoising.Path | None = None  # its denoising path; None: not drawn yet

    @property
    def drawn(self) -> denoising.Path:
        assert self.path is not None, f"the token at turn {self.turn} of image {self.row} was not drafted"
        return self.path


def places(drafts: Sequence[MarDraft], device: torch.device) -> Cells:
    return cells([draft.row for draft in drafts], [draft.turn for draft in drafts], device)


class SelfDrafter:
    """Drafts by the model itself: all with the conditioning of its last pass, in parallel in one chain.

    That pass may lack the last token, which was rejected in it and is drawn again in the same chain. The result is
    still exact: a draft may have any distribution that is known when it is tested. Its noise and its uniform number
    belong to its turn, and no decision has used them yet, since drafts after a rejected one are never tested. So a
    draft may even be drawn again from the same noise.
    """

    def __init__(self, runner: MarRunner, ahead: int) -> None:
        self.runner, self.ahead = runner, ahead
        self.z = torch.empty(0)  # [streams, B, L, D]
        self.current: list[bool] = []  # for each image, whether z includes all decided tokens

    def start(self, state: MarState) -> None:
        self.z = self.runner.read(state.tokens, state.order, state.counts, state.labels)
        self.current = [True] * len(state.counts)

    def undrawn(self, state: MarState) -> list[MarDraft]:
        """Drafts for the next tokens of every image, whose paths are still to be drawn."""
        here = _ahead(state, self.ahead)
        z = self.z[:, here.of, state.order[here.of, here.at]].unbind(1)
        return [
            MarDraft(b, turn, of, certain=self.current[b] and turn == state.counts[b])
            for b, turn, of in zip(here.rows, here.turns, z, strict=True)
        ]

    def propose(self, state: MarState, drafts: list[MarDraft]) -> list[MarDraft]:
        """The drafts of `undrawn`, whose paths have been drawn meanwhile."""
        return drafts

    def known(self) -> tuple[Tensor, list[int]]:
        """The conditioning [streams, B, L, D], and the images for which it is up to date."""
        return self.z, [b for b, current in enumerate(self.current) if current]

    def learn(self, z: Tensor, source_of: dict[int, int], current: list[int]) -> None:
        """Update the conditioning from z [streams, M, L, D]: `source_of` maps an image to one of the M, and `current`
        lists the images for which that is up to date."""
        rows, source = indices(z.device, list(source_of), list(source_of.values()))
        self.z[:, rows] = z[:, source]
        for b in source_of:
            self.current[b] = b in current


class SmallerDrafter:
    """Drafts by a smaller model, one token after the other."""

    def __init__(self, runner: MarRunner, ahead: int) -> None:
        self.runner, self.ahead = runner, ahead

    def start(self, state: MarState) -> None:
        """Nothing to do, since it reads the images again in every round."""

    def undrawn(self, state: MarState) -> list[MarDraft]:
        """None, since its drafts depend on tokens that are not drawn yet."""
        return []

    def propose(self, state: MarState, drafts: list[MarDraft]) -> list[MarDraft]:
        """Drafts for the next tokens of every image."""
        here, seen, drafted = _ahead(state, self.ahead), replace(state, tokens=state.tokens.clone()), {}
        for j in range(self.ahead):
            now = [i for i, b in enumerate(here.rows) if here.turns[i] == state.counts[b] + j]
            if not now:
                break
            turns = [here.turns[i] for i in now]
            groups = by_steps(self.runner, turns)
            these, *several = indices(here.of.device, now, *(some for _, some in groups))
            b, at = here.of[these], here.at[these]
            read = self.runner.read(seen.tokens[b], state.order[b], turns, state.labels[b])
            z = read[:, torch.arange(len(now), device=b.device), state.order[b, at]]
            for (steps, some), index in zip(groups, several, strict=True):
                path = fresh(self.runner, z[:, index], state, b[index], at[index], steps, DRAFTS)
                seen.put(b[index], at[index], path.x)
                for k, i in enumerate(some):
                    drafted[now[i]] = MarDraft(here.rows[now[i]], turns[i], z[:, i], path=path.take(slice(k, k + 1)))
        return [drafted[i] for i in range(len(here))]


def _ahead(state: MarState, most: int) -> Cells:
    """The next tokens, at most `most`, of every image that is not complete."""
    L = state.order.shape[1]
    ahead = [(b, turn) for b, n in enumerate(state.counts) for turn in range(n, min(L, n + most))]
    return cells([b for b, _ in ahead], [turn for _, turn in ahead], state.order.device)


def by_steps(runner: MarRunner, turns: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Each number of denoising steps, with the indices of the tokens that have it."""
    groups: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        groups.setdefault(runner.distribution.steps[turn], []).append(i)
    return list(groups.items())
