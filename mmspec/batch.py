"""Rows of frozen values: some of them, or those of two values as one, for every tensor inside at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class PerRow(Generic[T]):
    """A value for each row, on the host: a memory of drafters that keep no tensors."""

    values: list[T]

    def select(self, rows: Tensor) -> PerRow[T]:
        return PerRow([self.values[i] for i in rows.tolist()])

    def join(self, other: PerRow[T]) -> PerRow[T]:
        return PerRow(self.values + other.values)


def select(value: T, rows: Tensor | slice) -> T:
    """Index the batch axis of every tensor inside a frozen value."""
    if isinstance(value, Tensor):
        return value[rows]  # type: ignore[return-value]
    if hasattr(value, "__dataclass_fields__"):
        names = [f.name for f in fields(value)]  # type: ignore[arg-type]
        return type(value)(**{name: select(getattr(value, name), rows) for name in names})
    return value


def join(a: T, b: T, fills: Mapping[str, int], name: str = "") -> T:
    """Stack two frozen values along the batch axis, the smaller tensor of a pair filled up at its end.

    Args:
        fills: what to fill up with, by the tensor's name; 0 where nothing is said.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        shape = [max(x, y) for x, y in zip(a.shape[1:], b.shape[1:], strict=True)]
        return torch.cat([_filled(t, shape, fills.get(name, 0)) for t in (a, b)])  # type: ignore[return-value]
    if a is None or b is None:  # such as the distribution of a draft, which an empty one has not
        return None  # type: ignore[return-value]
    if hasattr(a, "__dataclass_fields__"):
        names = [f.name for f in fields(a)]  # type: ignore[arg-type]
        return type(a)(**{n: join(getattr(a, n), getattr(b, n), fills, n) for n in names})
    if isinstance(a, bool):
        return a and b
    return a if a == b else None  # type: ignore[return-value]


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[B, n, …] of x [B, L, …]: of each sequence the rows [B, n]."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


def fold(x: Tensor, streams: int) -> Tensor:
    """Streams from the feature axis to the batch axis, a row's one below the other: [B, n, S·F] to [B·S, n, F]."""
    if streams == 1:
        return x
    folded: Tensor = x.unflatten(-1, (streams, -1)).transpose(1, 2).flatten(0, 1)
    return folded


def unfold(x: Tensor, streams: int) -> Tensor:
    """And back: [B·S, n, F] to [B, n, S·F]."""
    if streams == 1:
        return x
    unfolded: Tensor = x.unflatten(0, (-1, streams)).transpose(1, 2).flatten(2)
    return unfolded


def _filled(t: Tensor, shape: list[int], fill: int) -> Tensor:
    out = t.new_full((t.shape[0], *shape), fill)
    out[tuple(slice(0, n) for n in t.shape)] = t
    return out
