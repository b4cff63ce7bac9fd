"""Attentions that can be part of a CUDA graph: kernels find the caches by their addresses, which are in a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from mmspec.functional import LayerAttention
from mmspec.kernels import dispatch
from mmspec.ragged_cache import Lengths, RaggedBuffer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # those of the kernel
WORDS = 10  # entries of a layer's row in a table, see `kernels/attention.py`


@dataclass(frozen=True)
class Steady:
    """An attention whose kernels' arguments do not change from call to call; the contents of some tensors do.

    Attributes:
        tensors: what a call reads, besides queries and new keys and values.
        within: the attention that reads these tensors at other places.
        dtype: of queries, keys and values.
        key: what else a recording depends on, besides the shapes of the tensors.
    """

    tensors: Sequence[Tensor]
    within: Callable[[Sequence[Tensor]], LayerAttention]
    dtype: torch.dtype
    key: Hashable


class AddressTable:
    """The addresses and strides of a cache's buffers, int64 [layers, 10] on the device; copied there when they change.

    Attributes:
        dtype: of all keys and values.
        aligned: whether their addresses and strides are divisible by 16.
    """

    def __init__(self) -> None:
        self.dtype, self.aligned = torch.float32, False
        self._of: list[ref[Tensor] | None] = []  # the buffers that it describes; they may be freed
        self._mask = [0, 0, 0]
        self._slots = 0  # in the smallest of them
        self._tensor: Tensor | None = None

    def tensor(self, buffers: Sequence[RaggedBuffer], at: Lengths, n: int, open_slots: Tensor | None) -> Tensor | None:
        """The table, after there is room for n more slots in every buffer.

        Args:
            open_slots: bool [B, L], false at slots with padding; None: there is none.

        Returns:
            None: a buffer is not laid out as the kernel needs it, they are of several dtypes or devices, or this device
            uses no kernels.
        """
        mask = [0, 0, 0] if open_slots is None else [open_slots.data_ptr(), open_slots.stride(0), open_slots.shape[1]]
        end = at.longest + n
        if end > self._slots or mask != self._mask or not self._describes(buffers):
            for buffer in buffers:
                buffer.make_room(end)
            self._mask = mask
            self._of = [None if t is None else ref(t) for buffer in buffers for t in (buffer.keys, buffer.values)]
            self._tensor = self._written(buffers, at.device.device, open_slots)
        return self._tensor

    def _describes(self, buffers: Sequence[RaggedBuffer]) -> bool:
        now = [t for buffer in buffers for t in (buffer.keys, buffer.values)]
        same = (t is (None if old is None else old()) for t, old in zip(now, self._of, strict=False))
        return len(now) == len(self._of) and all(same)

    def __reduce__(self) -> tuple[type[AddressTable], tuple[()]]:
        return AddressTable, ()  # a copy of a cache is elsewhere

    def _written(
        self, buffers: Sequence[RaggedBuffer], device: torch.device, open_slots: Tensor | None
    ) -> Tensor | None:
        held = [t for buffer in buffers for t in (buffer.keys, buffer.values) if t is not None]
        kinds = {(t.dtype, t.device) for t in held}
        regular = all(t.stride(3) == 1 and t.stride(2) == t.shape[3] for t in held)  # a head's slots follow each other
        if len(kinds) != 1 or not regular or (open_slots is not None and open_slots.stride(1) != 1):
            return None
        ((self.dtype, home),) = kinds
        kernels = home.type != "cuda" or not dispatch.defined("tree_attention", held[0])  # else only tests get here
        if home != device or self.dtype not in DTYPES or not kernels:
            return None
        self._slots = min(t.shape[2] for t in held)
        rows = []
        for keys, values in ((buffer.keys, buffer.values) for buffer in buffers):
            if keys is None or values is None:  # a layer without attention
                rows.append([0] * WORDS)
            else:
                strides = [*keys.stride()[:2], *values.stride()[:2]]
                rows.append([keys.data_ptr(), values.data_ptr(), *strides, *self._mask, 0])
        self.aligned = all(number % 16 == 0 for row in rows for number in row[:6])
        return torch.tensor(rows, device=device)


@torch.library.custom_op("mmspec::addressed_attention", mutates_args=())
def addressed(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, bits: Tensor, first: Tensor | None, scale: float,
    offset: int, aligned: bool,
) -> Tensor:  # fmt: skip
    """See `kernels.attention.addressed_attention`; the result [B, heads, n, E] has the memory layout [B, n, heads, E].

    It writes memory that torch does not see as an argument, so it must not be traced or compiled.
    """
    from mmspec.kernels import attention  # it needs Triton

    return attention.addressed_attention(q, k, v, table, lengths, bits, first, scale, offset, aligned)


@torch.library.custom_op("mmspec::addressed_append", mutates_args=())
def appended(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Append keys and values as `addressed` does, without an attention; returns an empty tensor."""
    from mmspec.kernels import attention

    attention.addressed_append(k, v, table, lengths, 0)
    return k.new_empty(0)
