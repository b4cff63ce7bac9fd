"""Attention of a draft's nodes to [cached prefix | nodes]: parts of the prefix in parallel, then their sum."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmspec.kernels.checks import BOOL, FLOATS, INDEX, INTERPRETED, PARTS, at_home, sizes, splits_for


@triton.jit
def _fold(
    q, K, V, slot, loaded, seen, m, z, acc, factor, stride_k, stride_v, d, e, D, E,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add one block of slots to the running softmax; slots that no query sees are not read."""
    slot = slot.to(tl.int64)
    k = tl.load(K + slot[:, None] * stride_k + d[None, :], mask=loaded[:, None] & (d < D)[None, :], other=0.0)
    v = tl.load(V + slot[:, None] * stride_v + e[None, :], mask=loaded[:, None] & (e < E)[None, :], other=0.0)
    if UPCAST:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(seen, scores * factor, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(m - safe)
    z = z * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype)
    if UPCAST:
        acc = acc * shrink[:, None] + tl.dot(weights.to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
    return top, z, acc


@triton.jit
def _filled(length, BLOCK_N: tl.constexpr):
    """The number of parts, none shorter than four blocks, that a prefix fills."""
    return tl.maximum(tl.cdiv(length, 4 * BLOCK_N), 1)


@triton.jit(do_not_specialize=["slots", "padded", "splits"])  # they change as a text grows
def _attend(
    Q, K, V, OUT, ACC, STAT, LENGTHS, BITS, OPEN, FIRST, TABLE,
    n, heads, groups, slots, padded, words, splits, factor, D, E,
    q_b, q_h, q_n, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_n, bits_b, bits_n, open_b, first_b,
    HAS_OPEN: tl.constexpr, HAS_FIRST: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    ADDRESSED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One tile of one kv head's queries (all its query heads stacked) against one part of the prefix.

    ADDRESSED: keys, values, padding and their strides are read from TABLE, see `addressed_attention`; a row uses no
    more of the `splits` parts than its length fills.
    """
    if ADDRESSED:
        K = tl.load(TABLE).to(tl.pointer_type(Q.dtype.element_ty))
        V = tl.load(TABLE + 1).to(tl.pointer_type(Q.dtype.element_ty))
        k_b, k_h, v_b, v_h = tl.load(TABLE + 2), tl.load(TABLE + 3), tl.load(TABLE + 4), tl.load(TABLE + 5)
        OPEN = tl.load(TABLE + 6).to(tl.pointer_type(tl.uint8))
        open_b, padded = tl.load(TABLE + 7), tl.load(TABLE + 8)
        if ALIGNED:
            K, V = tl.multiple_of(K, 16), tl.multiple_of(V, 16)
            k_b, k_h, v_b, v_h = (
                tl.multiple_of(k_b, 16), tl.multiple_of(k_h, 16), tl.multiple_of(v_b, 16), tl.multiple_of(v_h, 16)
            )  # fmt: skip
    part, b, g = tl.program_id(1), (tl.program_id(2) // groups).to(tl.int64), tl.program_id(2) % groups
    share = heads // groups
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < share * n
    head, node = (g * share + row // n).to(tl.int64), (row % n).to(tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    at = b * q_b + head * q_h + node * q_n
    q = tl.load(Q + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    K, V = K + b * k_b + g.to(tl.int64) * k_h, V + b * v_b + g.to(tl.int64) * v_h
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    length = tl.load(LENGTHS + b).to(tl.int32)
    if ADDRESSED:
        splits = tl.minimum(splits, _filled(length, BLOCK_N))
    chunk = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin, end = part * chunk, tl.minimum((part + 1) * chunk, length)
    if HAS_FIRST:
        first = tl.load(FIRST + b * first_b + node, mask=live, other=2147483647).to(tl.int32)
        begin = tl.maximum(begin, tl.min(first, 0))
    for start in range(begin, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        loaded = slot < end
        if HAS_OPEN:
            loaded = loaded & (tl.load(OPEN + b * open_b + slot, mask=loaded & (slot < padded), other=1) != 0)
        seen = live[:, None] & loaded[None, :]
        if HAS_FIRST:
            seen = seen & (slot[None, :] >= first[:, None])
        m, z, acc = _fold(q, K, V, slot, loaded, seen, m, z, acc, factor, k_t, v_t, d, e, D, E, UPCAST)
    if part == splits - 1:
        for start in range(0, words * 64, BLOCK_N):
            other = start + tl.arange(0, BLOCK_N)
            inside = other < words * 64
            if not ADDRESSED:
                inside = inside & (length + other < slots)
            word = BITS + b * bits_b + node[:, None] * bits_n + (other // 64)[None, :]
            word = tl.load(word, mask=live[:, None] & inside[None, :], other=0)
            seen = ((word >> (other % 64).to(tl.int64)[None, :]) & 1) != 0
            loaded = tl.max(seen.to(tl.int32), 0) != 0
            m, z, acc = _fold(q, K, V, length + other, loaded, seen, m, z, acc, factor, k_t, v_t, d, e, D, E, UPCAST)
    if SPLIT:
        line = ((part * (tl.num_programs(2) // groups) + b) * heads + head) * n + node
        tl.store(STAT + line * 2, m, mask=live)
        tl.store(STAT + line * 2 + 1, z, mask=live)
        keep = (live & (z > 0))[:, None] & (e < E)[None, :]
        tl.store(ACC + line[:, None] * E + e[None, :], acc, mask=keep)
    else:
        at = b * o_b + head * o_h + node * o_n
        acc = acc / tl.where(z > 0, z, 1.0)[:, None]
        keep = live[:, None] & (e < E)[None, :]
        tl.store(OUT + at[:, None] + e[None, :], acc.to(OUT.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["splits"])
def _reduce(
    ACC, STAT, OUT, LENGTHS, splits, heads, n, lines, E, o_b, o_h, o_n,
    ADDRESSED: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some queries' softmax."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    part, e = tl.arange(0, PARTS).to(tl.int64)[None, :], tl.arange(0, BLOCK_E)
    if ADDRESSED:  # the other parts left the mark for "saw no key"
        length = tl.load(LENGTHS + line // (heads * n), mask=line < lines, other=0).to(tl.int32)
        splits = tl.minimum(splits, tl.max(_filled(length, BLOCK_N), 0))
    there = (line < lines)[:, None] & (part < splits)
    m = tl.load(STAT + (part * lines + line[:, None]) * 2, mask=there, other=-float("inf"))
    top = tl.max(m, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_E], tl.float32)
    for i in range(0, splits):
        at = (line * 0 + i) * lines + line  # int64
        weight = tl.exp2(tl.load(STAT + at * 2, mask=line < lines, other=-float("inf")) - top)
        z = tl.load(STAT + at * 2 + 1, mask=line < lines, other=0.0)
        keep = (z > 0)[:, None] & (e < E)[None, :]  # a part that saw nothing has written no sum
        acc += weight[:, None] * tl.load(ACC + at[:, None] * E + e[None, :], mask=keep, other=0.0)
        total += weight * z
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = line // (heads * n) * o_b + (line // n) % heads * o_h + line % n * o_n
    keep = (line < lines)[:, None] & (e < E)[None, :]
    tl.store(OUT + at[:, None] + e[None, :], acc.to(OUT.dtype.element_ty), mask=keep)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    bits: Tensor,
    open_slots: Tensor | None = None,
    first: Tensor | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `reference.tree_attention`; scores and sums in float32, products in the inputs' dtype.

    Args:
        splits: parts of the prefix; None: enough to fill the device. The result's memory layout is [B, n, heads, E].
    """
    dim = sizes(
        "tree_attention",
        q=(q, "B heads n D", FLOATS),
        keys=(keys, "B kv_heads T D", (q.dtype,)),
        values=(values, "B kv_heads T E", (q.dtype,)),
        lengths=(lengths, "B", INDEX),
        bits=(bits, "B n W", INDEX),
        open_slots=(open_slots, "B L", BOOL),
        first=(first, "B n", INDEX),
    )
    heads, groups, T, E = (dim[k] for k in ("heads", "kv_heads", "T", "E"))
    if heads % groups:
        raise ValueError(f"tree_attention: {heads} query heads cannot share {groups} kv heads evenly")
    return _launched(q, keys, values, None, False, E, groups, T, lengths, bits, open_slots, first, scale, splits)


def addressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    bits: Tensor,
    first: Tensor | None = None,
    scale: float | None = None,
    offset: int = 0,
    aligned: bool = False,
) -> Tensor:
    """`reference.tree_attention` over buffers that are found by their addresses, after k and v were appended to them.

    A CUDA graph stores the arguments of its kernels. Here they contain neither a length nor the address of a cache, so
    one graph serves every cache and every length.

    Args:
        q: [B, heads, n, D].
        k, v: of the new rows, [B, kv_heads, n, D] and [B, kv_heads, n, E], written to the slots from
            `lengths + offset` on; the buffers must have room, and the dtype of q.
        table: int64 [10]: the addresses of keys and values, the strides of their rows and heads (those of their slots
            are D and E), the address of `open_slots`, its stride and its length, which may be 0; and one that is not
            used, so that the table of each layer begins at an address that 16 divides.
        lengths: int64 [B], slots before the draft.
        bits: int64 [B, n, W], which of the slots from `lengths` on each query sees.
        first: int64 [B, n], the first slot before the draft that each query sees.
        aligned: whether the addresses and strides of keys and values are divisible by 16.
    """
    dim = sizes(
        "addressed_attention",
        q=(q, "B heads n D", FLOATS),
        k=(k, "B kv_heads n D", (q.dtype,)),
        v=(v, "B kv_heads n E", (q.dtype,)),
        table=(table, "10", INDEX),
        lengths=(lengths, "B", INDEX),
        bits=(bits, "B n W", INDEX),
        first=(first, "B n", INDEX),
    )
    if len(table) != 10:
        raise ValueError(f"addressed_attention: table has {len(table)} entries, expected 10")
    addressed_append(k, v, table, lengths, offset)
    E, groups, T = dim["E"], dim["kv_heads"], 2**31 - 1  # the longest text
    return _launched(q, None, None, table, aligned, E, groups, T, lengths, bits, None, first, scale, None)


def addressed_append(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, offset: int) -> None:
    """Write k and v, as in `addressed_attention`, into the buffers of `table`."""
    (B, groups, n, D), E = k.shape, v.shape[3]
    with at_home(k):
        _append[(n, B * groups)](
            k, v, table, lengths, offset, groups, D, E, *k.stride()[:3], *v.stride()[:3],
            BLOCK_D=triton.next_power_of_2(D), BLOCK_E=triton.next_power_of_2(E),
        )  # fmt: skip


@triton.jit
def _append(
    KEYS, VALUES, TABLE, LENGTHS, offset, groups, D, E, k_b, k_h, k_n, v_b, v_h, v_n,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one new row and head into the buffers of TABLE."""
    i, b, g = tl.program_id(0), (tl.program_id(1) // groups).to(tl.int64), (tl.program_id(1) % groups).to(tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    slot = tl.load(LENGTHS + b) + offset + i
    k = tl.load(KEYS + b * k_b + g * k_h + i * k_n + d, mask=d < D)
    v = tl.load(VALUES + b * v_b + g * v_h + i * v_n + e, mask=e < E)
    K = tl.load(TABLE).to(tl.pointer_type(KEYS.dtype.element_ty))
    V = tl.load(TABLE + 1).to(tl.pointer_type(VALUES.dtype.element_ty))
    tl.store(K + b * tl.load(TABLE + 2) + g * tl.load(TABLE + 3) + slot * D + d, k, mask=d < D)
    tl.store(V + b * tl.load(TABLE + 4) + g * tl.load(TABLE + 5) + slot * E + e, v, mask=e < E)


def _launched(
    q: Tensor, keys: Tensor | None, values: Tensor | None, table: Tensor | None, aligned: bool, E: int, groups: int,
    T: int, lengths: Tensor, bits: Tensor, open_slots: Tensor | None, first: Tensor | None, scale: float | None,
    splits: int | None,
) -> Tensor:  # fmt: skip
    """The attention of q over keys and values of T slots, or of at most T and found by their table."""
    (B, heads, n, D), W = q.shape, bits.shape[2]
    out = torch.empty(B, n, heads, E, dtype=q.dtype, device=q.device).transpose(1, 2)
    if not out.numel():
        return out
    strides = (0, 0, D, 0, 0, E) if keys is None or values is None else (*keys.stride()[:3], *values.stride()[:3])
    rows = heads // groups * n
    wide = {"BLOCK_D": max(16, triton.next_power_of_2(D)), "BLOCK_E": max(16, triton.next_power_of_2(E))}
    size = max(wide.values()) * q.element_size()  # bytes of a row
    most = 32 if q.dtype == torch.float32 else 64  # so that it compiles quickly
    block_n = max(16, min(most, 2**14 // size))  # two blocks each of keys and values, and the queries, in 99 KiB
    block_m = max(16, min(block_n, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    splits = splits or splits_for(q, tiles * B * groups, T, 4 * block_n)
    partial = torch.empty(splits, B, heads, n, E + 2, dtype=torch.float32, device=q.device) if splits > 1 else None
    acc = out if partial is None else partial.view(-1)[: -2 * splits * B * heads * n]
    stat = out if partial is None else partial.view(-1)[-2 * splits * B * heads * n :]
    with at_home(q):
        _attend[(tiles, splits, B * groups)](
            q, _or(keys, q), _or(values, q), out, acc, stat, lengths, bits, _or(open_slots, lengths),
            _or(first, lengths), _or(table, lengths),
            n, heads, groups, T, 0 if open_slots is None else open_slots.shape[1], W, splits,
            (D**-0.5 if scale is None else scale) * math.log2(math.e), D, E,
            *q.stride()[:3], *strides, *out.stride()[:3], *bits.stride()[:2],
            0 if open_slots is None else open_slots.stride(0), 0 if first is None else first.stride(0),
            HAS_OPEN=open_slots is not None or table is not None, HAS_FIRST=first is not None, SPLIT=splits > 1,
            UPCAST=INTERPRETED and q.dtype == torch.bfloat16,  # the interpreter's dot of bfloat16 is wrong
            ADDRESSED=table is not None, ALIGNED=aligned, BLOCK_M=block_m, BLOCK_N=block_n, **wide, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            lines = B * heads * n
            _reduce[(triton.cdiv(lines, 16),)](
                acc, stat, out, lengths, splits, heads, n, lines, E, *out.stride()[:3],
                ADDRESSED=table is not None, BLOCK_N=block_n, PARTS=PARTS, LINES=16, BLOCK_E=wide["BLOCK_E"],
            )  # fmt: skip
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or if it is None another one whose pointer is never used."""
    if tensor is None:
        return other
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
