"""The attentions of captured drafts over a drafter's memory, which a CUDA graph can contain (`mmspec/steady.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.functional import LayerAttention
from mmspec.kernels import dispatch
from mmspec.kernels import reference as ops
from mmspec.steady import Steady, addressed, appended

if TYPE_CHECKING:
    from mmspec.drafters.feature import FeatureMemory


@dataclass(frozen=True)
class MemoryAttention:
    """The attentions of a captured draft, and how a graph computes them.

    Attributes:
        before, after: the memory before and after the round's accepted rows are read.
        plain: computes an attention over these memories.
        inside: makes the attention of a graph from the layers' table, the lengths before and after, and a Room.
        most: number of slots after `before` that a draft may write; a recording that writes more is refused.
    """

    before: FeatureMemory
    after: FeatureMemory
    plain: LayerAttention
    inside: Callable[[Tensor, Tensor, Tensor, Room], LayerAttention] | None
    most: int

    def __call__(self, *args: Tensor | float) -> Tensor:
        return self.plain(*args)

    def steadied(self) -> Steady | None:
        """See `mmspec/compile/graphs.py`; None: its kernels are not used here."""
        memory, inside = self.before, self.inside
        if inside is None or (memory.positions.is_cuda and dispatch.defined("tree_attention", memory.positions)):
            return None
        room = self.most + self.after.lengths.longest - memory.lengths.longest
        open_slots = memory.open_slots if memory.padded else None
        table = memory.table.tensor((memory.slots, *memory.more), memory.lengths, room, open_slots)
        if table is None:
            return None
        dtype, room_for = memory.table.dtype, Room(self.most, memory.table.dtype, memory.table.aligned)

        def within(places: Sequence[Tensor]) -> LayerAttention:
            return inside(places[0], places[1], places[2], room_for)

        tensors = [table, memory.lengths.device, self.after.lengths.device]
        return Steady(tensors, within, dtype, room_for.aligned)


@dataclass(frozen=True)
class Room:
    """What a graph may write: entries of this dtype, to so many slots after the memory's length."""

    slots: int
    dtype: torch.dtype
    aligned: bool

    def check(self, end: int, *tensors: Tensor) -> None:
        """RuntimeError, which ends a recording, if it writes other entries or further slots."""
        if end > self.slots or any(t.dtype != self.dtype for t in tensors):
            raise RuntimeError("a draft does not fit into the memory as it was reserved")


def by_level(rows: int) -> Callable[[Tensor, Tensor, Tensor, Room], LayerAttention]:
    """Of a feature drafter: an attention is numbered by the offset at which it appends, the accepted `rows` first."""

    def inside(table: Tensor, before: Tensor, after: Tensor, room: Room) -> LayerAttention:
        def attend(at: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
            lengths, offset = (before, at) if at < rows else (after, at - rows)
            n = q.shape[2]
            room.check(offset + n, q, k, v)
            if seen is None:
                seen = torch.ones(len(q), n, offset + n, dtype=torch.bool, device=q.device)
            bits = ops.bit_rows(seen[..., -(offset + n) :].expand(len(q), -1, -1))
            return addressed(q, k, v, table[0], lengths, bits, None, scale, offset, room.aligned)

        return attend

    return inside


def by_layer(rows: int, causal: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor, Room], LayerAttention]:
    """Of a block drafter, whose layers first append the accepted `rows`, then the block, where a row of some layers
    (`causal`) sees only the rows before it."""

    def inside(table: Tensor, before: Tensor, after: Tensor, room: Room) -> LayerAttention:
        def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            n = q.shape[2]
            room.check(max(rows, n), q, k, v)
            appended(k[:, :, :rows], v[:, :, :rows], table[layer], before)
            seen = torch.ones(len(q), n, n, dtype=torch.bool, device=q.device)
            bits = ops.bit_rows(seen.tril() if causal[layer] else seen)
            new = k[:, :, rows:], v[:, :, rows:]
            return addressed(q, *new, table[layer], after, bits, None, q.shape[-1] ** -0.5, 0, room.aligned)

        return attend

    return inside
