"""Moves the accepted cache entries of all layers and rows down in one launch, by a table of pointers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import INDEX, at_home, sizes

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_COLUMNS = tl.constexpr(6)  # address, heads, width, and strides of row, head and slot; the last four in words


@triton.jit(do_not_specialize=["K"])
def _compact(
    TABLE, SOURCE, START, K, heads, source_b,
    WORD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head of one row of one buffer, `BLOCK_D` words of it: everything is read before anything is written."""
    entry = TABLE + tl.program_id(0).to(tl.int64) * _COLUMNS
    b = tl.program_id(1).to(tl.int64)
    h, part = (tl.program_id(2) % heads).to(tl.int64), tl.program_id(2) // heads
    if h < tl.load(entry + 1):
        width, slot_stride = tl.load(entry + 2), tl.load(entry + 5)
        base = tl.load(entry).to(tl.pointer_type(WORD)) + b * tl.load(entry + 3) + h * tl.load(entry + 4)
        j = tl.arange(0, BLOCK_K)
        d = part * BLOCK_D + tl.arange(0, BLOCK_D)
        source = tl.load(SOURCE + b * source_b + j, mask=j < K, other=0)
        target = tl.load(START + b) + j
        moves = (j < K) & (source != target)
        mask = moves[:, None] & (d < width)[None, :]
        held = tl.load(base + source[:, None] * slot_stride + d[None, :], mask=mask, other=0)
        tl.debug_barrier()  # a slot may be one entry's source and another's target
        tl.store(base + target[:, None] * slot_stride + d[None, :], held, mask=mask)


@lru_cache(maxsize=32)
def _table(entries: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table on the device; it stays the same until a buffer grows."""
    return torch.tensor(entries, dtype=torch.int64).to(device)


def compact_rows(buffers: Sequence[Tensor], source: Tensor, start: Tensor) -> None:
    """See `reference.compact_rows`. All buffers must have one dtype and device."""
    if not buffers or not source.numel():
        return
    first = buffers[0]
    for name, buffer in enumerate(buffers):  # a quick check first, since this runs in every round
        if buffer is first or (buffer.dtype, buffer.device, len(buffer), buffer.stride(-1)) != (
            first.dtype, first.device, len(source), 1,
        ):  # fmt: skip
            sizes(
                "compact_rows",
                source=(source, "B K", INDEX),
                start=(start, "B", INDEX),
                **{f"buffers[{name}]": (buffer, "B heads slots width", (first.dtype,))},
            )
    unit = math.gcd(8, *(n for t in buffers for n in _bytes(t)))
    entries = tuple(
        (t.data_ptr(), t.shape[1], t.shape[3] * t.element_size() // unit, *(n // unit for n in _bytes(t)[2:]))
        for t in buffers
    )
    heads, width = (max(e[i] for e in entries) for i in (1, 2))
    K = source.shape[1]
    block_k = max(16, triton.next_power_of_2(K))  # since the length of the path changes from round to round
    block_d = max(1, min(triton.next_power_of_2(width), 4096 // block_k))
    with at_home(first):
        _compact[(len(buffers), len(source), heads * triton.cdiv(width, block_d))](
            _table(entries, first.device), source, start, K, heads, source.stride(0),
            WORD=_WORDS[unit], BLOCK_K=block_k, BLOCK_D=block_d,
        )  # fmt: skip


def _bytes(t: Tensor) -> tuple[int, ...]:
    """Bytes that the word size must divide: address, length of a slot, strides of row, head and slot."""
    size = t.element_size()
    return t.data_ptr(), t.shape[3] * size, *(s * size for s in t.stride()[:3])
