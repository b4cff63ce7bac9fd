"""The memory of drafters that read features, and the attentions over it, which a CUDA graph can contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from mmspec.drafters.blocks import Attend, attention
from mmspec.functional import LayerAttention, cut
from mmspec.kernels import reference as ops
from mmspec.ragged_cache import Lengths, RaggedBuffer, visibility
from mmspec.steady import AddressTable, Steady, addressed, appended
from mmspec.types import stacked

KeysValues = tuple[Tensor, Tensor]  # [B, heads, n, D] each


@dataclass
class FeatureMemory:
    """A feature drafter's state: keys and values of the rows it has read, per sequence; streams are further heads."""

    slots: RaggedBuffer
    lengths: Lengths  # rows read, per sequence
    positions: Tensor  # [B], of the next row
    open_slots: Tensor  # bool [B, L], false at padding
    padded: bool  # whether any slot is padding, on the host
    context: Tensor | None = None  # [B, 1, C], context for `inputs` at the next rows
    stats: dict[str, float] = field(default_factory=dict)  # for `Stats.drafter`, of the prompts
    more: tuple[RaggedBuffer, ...] = ()  # of the layers after the first
    table: AddressTable = field(default_factory=AddressTable)  # of all layers

    def _buffers(self) -> tuple[RaggedBuffer, ...]:
        return (self.slots, *self.more)

    def select(self, rows: Tensor) -> FeatureMemory:
        order = rows.tolist()
        for slots in self._buffers():
            slots.select(rows, order, self.lengths.longest)
        lengths, context = self.lengths.select(rows, order), None if self.context is None else self.context[rows]
        positions, open_slots = self.positions[rows], self.open_slots[rows]
        return replace(self, lengths=lengths, positions=positions, open_slots=open_slots, context=context)

    def join(self, other: FeatureMemory) -> FeatureMemory:
        for mine, others in zip(self._buffers(), other._buffers(), strict=True):
            mine.join(others, self.lengths.longest)
        positions = torch.cat([self.positions, other.positions])
        both = None if self.context is None or other.context is None else torch.cat([self.context, other.context])
        lengths, padded = self.lengths.join(other.lengths), self.padded or other.padded
        slots = stacked(self.open_slots, other.open_slots, True)
        return replace(self, lengths=lengths, positions=positions, padded=padded, open_slots=slots, context=both)

    def attend(
        self, at: Lengths, ancestors: Tensor | None, slots: RaggedBuffer | None = None, scale: float | None = None
    ) -> Attend:
        """Attention over the rows read and the nodes appended since. The last M columns of `ancestors` [B, n, ≥ M] are
        the mask of the M rows after `self.lengths`, of which the last n are appended at `at`; None: all visible."""

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (slots or self.slots).append(k, v, at)
            return attention(q, keys, values, self.visible(at, q.shape[2], ancestors), scale)

        return run

    def over(self, layer: int, ahead: KeysValues, at: Lengths, run: Callable[..., Tensor]) -> Attend:
        """Attention over a layer's keys and values after `ahead` was appended at `at`: `run` with the layer's slots."""
        slots = self._buffers()[layer]
        slots.append(*ahead, at)
        return partial(run, slots)

    def state(self) -> list[Tensor]:
        """The tensors that a captured draft reads besides keys and values."""
        return [self.positions, *([] if self.context is None else [self.context])]

    @contextmanager
    def passing(self, state: Sequence[Tensor]) -> Iterator[PassThroughMemory]:
        """For a capture: an empty memory of these rows with this state, whose attentions are cuts, numbered by the
        offset at which they append."""
        yield PassThroughMemory(*state)

    def visible(self, at: Lengths, n: int, ancestors: Tensor | None) -> Tensor | None:
        """The mask, bool [B, n, T], of n rows that are appended at `at`, see `attend`; None: everything is visible."""
        if ancestors is None and not self.padded and at.even:
            return None
        M = at.longest + n - self.lengths.longest
        some = torch.ones(len(at.device), n, M, dtype=torch.bool, device=at.device.device)
        return visibility(self.lengths, self.open_slots, some if ancestors is None else ancestors[..., -M:])


class PassThroughMemory:
    """See `FeatureMemory.passing`."""

    more = ()  # feature drafters are captured only with one layer

    def __init__(self, positions: Tensor, context: Tensor | None = None) -> None:
        self.positions, self.context = positions, context
        self.lengths = Lengths.of([0] * len(positions), positions.device)

    def attend(self, at: Lengths, seen: Tensor | None) -> Attend:
        return lambda q, k, v: cut(at.longest, q.shape[-1] ** -0.5, q, k, v, seen)

    def over(self, layer: int, ahead: KeysValues, at: Lengths, run: Callable[..., Tensor]) -> Attend:
        """`ahead` is put before the rows' own keys and values; the replay splits them again."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = [torch.cat([first, mine], 2) for first, mine in zip(ahead, (k, v), strict=True)]
            return cut(layer, q.shape[-1] ** -0.5, q, both[0], both[1])

        return attend


# -- attentions over it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryAttention:
    """The attentions of a captured draft, and how a graph computes them.

    Attributes:
        before, after: the memory before and after the round's accepted rows are read.
        plain: computes an attention over these memories.
        inside: makes the attention of a graph from the layers' table, the lengths before and after, and a Room; None:
            the kernel does not know this attention.
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
        """See `mmspec/compile/graphs.py`; None: the kernel cannot be used here."""
        memory, inside = self.before, self.inside
        if inside is None:
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
