"""Rows that leave and join a cache: what is kept, and how little is copied for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec.ragged_cache import Lengths, RaggedBuffer, closed_ranks


class Written(TorchDispatchMode):
    """Numbers that copies, gathers and fresh tensors have written."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "index", "new_zeros", "zeros", "fill_", "clone", "index_put_"):
            self.numbers += out.numel()
        return out


def filled(rows: int, slots: int, reserve: int) -> tuple[RaggedBuffer, Lengths, Tensor]:
    buffer, kept = RaggedBuffer(reserve), torch.randn(rows, 2, slots, 4)
    buffer.append(kept, -kept, Lengths.of([0] * rows, kept.device))
    return buffer, Lengths.of([slots] * rows, kept.device), kept


@pytest.mark.parametrize("keep", [[0, 1, 2, 3], [1, 2, 3], [0, 3], [3], [0, 1, 2], [1, 3]])
def test_the_last_rows_take_the_places_of_those_that_go(keep: list[int]) -> None:
    buffer, lengths, kept = filled(4, 5, 9)
    order = closed_ranks(keep)
    moved = sum(row >= len(keep) for row in keep)
    assert sorted(order) == keep and sum(i != row for i, row in enumerate(order)) == moved
    assert buffer.keys is not None and buffer.values is not None
    address = buffer.keys.data_ptr()
    with Written() as seen:
        buffer.select(torch.tensor(order), order, lengths.longest)
    assert seen.numbers == 2 * moved * 2 * 5 * 4, "keys and values of the moved rows, as far as they are filled"
    assert torch.equal(buffer.keys[:, :, :5], kept[order]) and torch.equal(buffer.values[:, :, :5], -kept[order])
    assert buffer.keys.data_ptr() == address, "what knows the addresses need not be told"
    assert lengths.select(torch.tensor(order), order).host == (5,) * len(keep)


def test_any_other_order_is_gathered() -> None:
    for order in ([2, 0, 1], [1, 1, 0]):
        one, _, kept = filled(3, 4, 4)
        one.select(torch.tensor(order), order, 4)
        assert one.keys is not None and torch.equal(one.keys, kept[order])


def test_rows_that_join_go_where_others_have_left() -> None:
    """Only what is theirs is written, and nothing of a row that was there before is left in it, not even NaN."""
    buffer, _, kept = filled(3, 6, 8)
    assert buffer.keys is not None and buffer.values is not None
    buffer.keys[2] = torch.nan
    buffer.select(torch.tensor([0, 1]), [0, 1], 6)
    new, _, fresh = filled(1, 4, 8)
    address = buffer.keys.data_ptr()
    with Written() as seen:
        buffer.join(new, 6)
    assert buffer.keys.data_ptr() == address and seen.numbers == 2 * 8 * 2 * 4, "one row of 8 slots, keys and values"
    assert torch.equal(buffer.keys[:2, :, :6], kept[:2]) and torch.equal(buffer.keys[2, :, :4], fresh[0])
    assert not buffer.keys[2, :, 4:].any() and not buffer.keys.isnan().any()
    more, _, _ = filled(1, 4, 8)
    buffer.join(more, 6)  # there is no room: all are copied
    assert len(buffer.keys) == 4 and torch.equal(buffer.keys[:2, :, :6], kept[:2])


def test_room_that_is_far_too_long_is_let_go() -> None:
    buffer, _, _ = filled(2, 6, 900)
    buffer.select(torch.tensor([0]), [0], 6)
    new, _, _ = filled(1, 4, 8)
    buffer.join(new, 6)
    assert buffer.keys is not None and buffer.keys.shape[2] == 8
