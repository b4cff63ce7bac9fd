"""What a target of transformers keeps per row between two forwards: cache, positions, padding, token types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.pipelines.cache import SlotCache
from mmspec.types import Round


def stacked(hidden: Tensor, streams: int) -> Tensor:
    """Streams from the batch axis to the feature axis: [S·B, n, F] to [B, n, S·F]."""
    return hidden if streams == 1 else torch.cat(hidden.chunk(streams), -1)


def spread(hidden: Tensor, streams: int) -> Tensor:
    """And back: [B, n, S·F] to [S·B, n, F]."""
    return hidden if streams == 1 else torch.cat(hidden.chunk(streams, -1))


def tiled(t: Tensor, streams: int) -> Tensor:
    """One copy below the other for every stream: [B, …] to [S·B, …]."""
    return t if streams == 1 else t.repeat(streams, *[1] * (t.dim() - 1))


class Places(Protocol):
    """Positions of the tokens to come."""

    def at(self, index: Tensor) -> Tensor:
        """Position ids, [..., B, N], of generated tokens number `index` [B, N] (from 0)."""

    def select(self, rows: Tensor) -> Any: ...

    def join(self, other: Any) -> Any: ...


@dataclass(frozen=True)
class Onward:
    """Positions that go up by one."""

    first: Tensor  # [..., B, 1], of the first generated token; Qwen's M-RoPE has leading axes

    def at(self, index: Tensor) -> Tensor:
        return self.first + index

    def select(self, rows: Tensor) -> Onward:
        return Onward(self.first[..., rows, :])

    def join(self, other: Onward) -> Onward:
        return Onward(torch.cat([self.first, other.first], -2))


@dataclass(frozen=True)
class Listed:
    """Positions listed beforehand, as for a picture that is written row by row."""

    table: Tensor  # [B, axes, steps]

    def at(self, index: Tensor) -> Tensor:
        steps = index.clamp(max=self.table.shape[2] - 1)  # past the end lies what no row will keep
        return self.table.gather(2, steps[:, None].expand(-1, self.table.shape[1], -1)).permute(1, 0, 2)

    def select(self, rows: Tensor) -> Listed:
        return Listed(self.table[rows])

    def join(self, other: Listed) -> Listed:
        longest = max(self.table.shape[2], other.table.shape[2])
        tables = [pad(t, (0, longest - t.shape[2]), mode="replicate") for t in (self.table, other.table)]
        return Listed(torch.cat(tables))


def positions_read(told: Tensor | None, places: Places, begin: Tensor, read: int) -> Tensor:
    """Position ids [B, A, L + 1] of the prompt that the decoder has read, on A axes, and of the token after it.

    Args:
        told: what the decoder was given, [A, B or 1, L] or [B or 1, L]; None: it counted by itself.
        places: of the tokens to come.
        begin: zeros [B, 1].
        read: L.
    """
    onward = places.at(begin)
    onward = onward[None] if onward.dim() == 2 else onward
    if told is None:
        told = onward[:1] + torch.arange(-read, 0, device=onward.device)
    told = told[None] if told.dim() == 2 else told
    onward = onward if len(onward) == len(told) else onward[-1:].expand(len(told), -1, -1)
    return torch.cat([told.to(onward.device).expand(-1, len(begin), -1), onward], -1).transpose(0, 1)


@dataclass
class State:
    """What the target keeps for B rows in S streams: S·B rows, one stream after the other."""

    cache: SlotCache
    places: Places
    open_slots: Tensor  # bool [S·B, L], false at the prompt's padding
    types: dict[str, Tensor]  # token types of generated text, [S·B, 1] each
    streams: int = 1
    padded: bool = True  # whether any slot may be closed, as the host knows it

    def commit(self, round_: Round) -> None:
        """Keep what stands, in every stream; on a chain it lies in its place already."""
        kept, count = tiled(round_.kept, self.streams), tiled(round_.verdict.count, self.streams)
        self.cache.commit(kept, round_.counts * self.streams, count, round_.draft.tree.is_chain)

    def select(self, rows: Tensor) -> State:
        each = len(self.open_slots) // self.streams
        return self._pick(torch.cat([rows + s * each for s in range(self.streams)]))

    def join(self, other: State) -> State:
        """These rows, then the other's, in every stream."""
        mine, theirs = (torch.arange(len(t)).chunk(self.streams) for t in (self.open_slots, other.open_slots))
        stacked = self.stack(other)
        if self.streams == 1:
            return stacked
        order = [part for pair in zip(mine, [t + len(self.open_slots) for t in theirs], strict=True) for part in pair]
        return stacked._pick(torch.cat(order).to(self.open_slots.device))

    def stack(self, other: State) -> State:
        """The other's rows below these, whatever stream they are of."""
        longest = max(self.open_slots.shape[1], other.open_slots.shape[1])
        open_slots = [pad(t, (0, longest - t.shape[1]), value=True) for t in (self.open_slots, other.open_slots)]
        types = {name: torch.cat([t, other.types[name]]) for name, t in self.types.items()}
        places = self.places.join(other.places)
        return State(
            self.cache.join(other.cache),
            places,
            torch.cat(open_slots),
            types,
            self.streams,
            self.padded or other.padded,
        )

    def _pick(self, rows: Tensor) -> State:
        types = {name: t[rows] for name, t in self.types.items()}
        return State(
            self.cache.select(rows), self.places.select(rows), self.open_slots[rows], types, self.streams, self.padded
        )
