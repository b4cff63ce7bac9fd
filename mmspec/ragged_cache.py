"""Ragged KV cache: each row appends keys and values at its own length, so that a chain commits without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.modes import lasting
from mmspec.types import gather_rows


@dataclass(frozen=True)
class Lengths:
    """The number of slots that each row has filled, on the host and on the device."""

    host: tuple[int, ...]
    device: Tensor  # int64 [B]
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _slots: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, host: list[int] | tuple[int, ...], device: torch.device) -> Lengths:
        return cls(tuple(host), torch.tensor(host, device=device))

    def on(self, device: torch.device) -> Tensor:
        """`device` [B] on another device, copied once, for models that are split over devices."""
        if device == self.device.device:
            return self.device
        if device not in self._copies:
            self._copies[device] = self.device.to(device)
        return self._copies[device]

    def slots(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows [B, 1] and their next n slots [B, n], computed once for all layers."""
        if (n, device) not in self._slots:
            rows = torch.arange(len(self.host), device=device)[:, None]
            self._slots[n, device] = rows, self.on(device)[:, None] + torch.arange(n, device=device)
        return self._slots[n, device]

    @cached_property
    def longest(self) -> int:
        return max(self.host, default=0)

    @cached_property
    def even(self) -> bool:
        return len(set(self.host)) <= 1

    def plus(self, counts: tuple[int, ...], device_counts: Tensor) -> Lengths:
        return Lengths(tuple(n + c for n, c in zip(self.host, counts, strict=True)), self.device + device_counts)

    def further(self, n: int) -> Lengths:
        return Lengths(tuple(length + n for length in self.host), self.device + n)

    def select(self, rows: Tensor, order: Sequence[int]) -> Lengths:
        """Some rows; `order` is `rows` on the host."""
        return Lengths(tuple(self.host[i] for i in order), self.device[rows])

    def join(self, other: Lengths) -> Lengths:
        return Lengths(self.host + other.host, torch.cat([self.device, other.device]))


class RaggedBuffer:
    """Keys and values of one attention layer, [B, heads, capacity, width], written in place."""

    def __init__(self, reserve: int = 0) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.reserve = reserve  # capacity to take at the first write

    def append(self, keys: Tensor, values: Tensor, at: Lengths) -> tuple[Tensor, Tensor]:
        """Write [B, heads, n, width] after each row's own length; returns views of all slots up to the last one."""
        n = keys.shape[2]
        end = at.longest + n
        self.make_room(end, keys, values)
        assert self.keys is not None and self.values is not None
        if at.even:
            self.keys[:, :, end - n : end] = keys
            self.values[:, :, end - n : end] = values
        else:
            rows, slots = at.slots(n, keys.device)
            self.keys[rows, :, slots] = keys.transpose(1, 2)
            self.values[rows, :, slots] = values.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def make_room(self, end: int, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """Have at least `end` slots, for entries like these; None: like those that are held."""
        keys, values = self.keys if keys is None else keys, self.values if values is None else values
        if keys is None or values is None:
            return
        if not (_has_room(self.keys, keys, end) and _has_room(self.values, values, end)):
            with lasting():
                self.keys, self.values = self._room(self.keys, keys, end), self._room(self.values, values, end)

    def _room(self, buffer: Tensor | None, like: Tensor, end: int) -> Tensor:
        """A buffer with at least `end` slots; grows by at least a quarter, so that copies are rare.

        Its dtype is wide enough for the old and the new entries, which differ if only one of them was under autocast.
        """
        if _has_room(buffer, like, end):
            return buffer
        slots, dtype = (0, like.dtype) if buffer is None else (buffer.shape[2], buffer.dtype)
        capacity = max(end, slots + slots // 4 if slots else self.reserve)
        size = (like.shape[0], like.shape[1], capacity, like.shape[3])
        grown = like.new_zeros(size, dtype=torch.promote_types(dtype, like.dtype))
        if buffer is not None:
            grown[:, :, :slots] = buffer
        return grown

    def select(self, rows: Tensor, order: Sequence[int], used: int) -> None:
        """Keep some rows. With the order of `closed_ranks` the last rows fill the gaps, and no other row is moved.

        Args:
            rows: int64 [B'], in any order; done in place if each row stays where it is or comes from an index ≥ B'.
            order: `rows` on the host.
            used: the largest number of slots that a row has filled.
        """
        if self.keys is None or self.values is None:
            return
        if any(i != row < len(order) for i, row in enumerate(order)):
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]
            return
        for buffer in (self.keys, self.values):
            for i, row in enumerate(order):
                if i != row:
                    buffer[i, :, :used] = buffer[row, :, :used]
        self.keys, self.values = self.keys[: len(order)], self.values[: len(order)]

    def keep(self, order: Tensor) -> None:
        """Keep only the slots at `order` [B, n]."""
        if self.keys is not None and self.values is not None:
            home = order.to(self.keys.device)
            kept = [gather_rows(t.transpose(1, 2), home).transpose(1, 2) for t in (self.keys, self.values)]
            self.keys, self.values = kept[0].contiguous(), kept[1].contiguous()

    def join(self, other: RaggedBuffer, end: int) -> None:
        """Append the rows of another buffer. Own slots from `end` on are not in use and may be dropped.

        The new rows are written where rows have left, if there is room; otherwise all rows are copied to a new buffer.
        """
        if self.keys is None and other.keys is None:  # a layer without attention
            return
        if self.keys is None or self.values is None or other.keys is None or other.values is None:
            raise ValueError("both caches must hold a prompt before their rows can be joined")
        self.keys, self.values = _joined(self.keys, other.keys, end), _joined(self.values, other.values, end)


def _has_room(buffer: Tensor | None, like: Tensor, end: int) -> TypeGuard[Tensor]:
    """Whether `end` slots of entries like these fit into a buffer as it is."""
    if buffer is None or end > buffer.shape[2]:
        return False
    return buffer.dtype == like.dtype or buffer.dtype == torch.promote_types(buffer.dtype, like.dtype)


def closed_ranks(keep: Sequence[int]) -> list[int]:
    """The order of the rows to keep (given in ascending order) for which `RaggedBuffer.select` moves the fewest."""
    count = len(keep)
    moving = iter([row for row in keep if row >= count])
    staying = {row for row in keep if row < count}
    return [place if place in staying else next(moving) for place in range(count)]


def _joined(mine: Tensor, theirs: Tensor, end: int) -> Tensor:
    """Rows of `theirs` after rows of `mine`, of which `end` slots are in use; slots past those of `theirs` are zero."""
    B, b, need = len(mine), len(theirs), max(end, theirs.shape[2])
    rooms = mine.untyped_storage().nbytes() // mine.element_size() // max(1, mine.stride(0)) if B else 0
    if mine.storage_offset() == 0 and B + b <= rooms and need <= mine.shape[2] <= need + 256:
        out = mine.as_strided((B + b, *mine.shape[1:]), mine.stride())
        out[B:, :, theirs.shape[2] :] = 0
    else:
        out = mine.new_zeros(B + b, mine.shape[1], need, mine.shape[3])
        out[:B, :, :end] = mine[:, :, :end]
    out[B:, :, : theirs.shape[2]] = theirs
    return out


def visibility(at: Lengths, open_slots: Tensor, ancestors: Tensor) -> Tensor:
    """The attention mask of a draft: each node sees the row's own cached slots and the node's ancestors.

    Args:
        at: lengths before the nodes were appended.
        open_slots: bool [B, L], false at cached slots that hold padding; no slot past L is padding.
        ancestors: bool [B, n, N], which of the N appended nodes each of n queries sees.

    Returns:
        bool [B, n, longest + N], true where visible.
    """
    B, n, N = ancestors.shape
    past = pad(open_slots, (0, max(0, at.longest - open_slots.shape[1])), value=True)[:, None, : at.longest]
    if at.even:
        return torch.cat([past.expand(B, n, at.longest), ancestors], 2)
    slot = torch.arange(at.longest + N, device=ancestors.device)
    offset = slot - at.device[:, None]  # [B, T]: 0 at the row's root
    tree = ancestors.gather(2, offset.clamp(0, N - 1)[:, None].expand(B, n, -1))
    past = pad(past, (0, N))
    return torch.where((offset < 0)[:, None], past, tree & (offset < N)[:, None])
