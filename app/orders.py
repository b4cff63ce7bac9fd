"""What `mmspec generate` is asked to draw, and the files that its pictures go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DrawingOrder:
    """One picture to draw."""

    asked: Any  # prompt or class
    seed: int
    path: Path


def write(orders: Sequence[DrawingOrder], pictures: Sequence[Any]) -> None:
    """Each picture into its own file."""
    for order, picture in zip(orders, pictures, strict=True):
        order.path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(order.path)
        print(order.path)


def write_sheet(orders: Sequence[DrawingOrder], pictures: Sequence[Any], plain: Sequence[Any], across: int) -> None:
    """All on one sheet, a row a prompt, and below each row that of plain decoding, if there is one."""
    from mmspec.app.painter import sheet

    rows = []
    for i in range(0, len(pictures), across):
        rows.append((str(orders[i].asked), pictures[i : i + across]))
        rows += [("plain decoding", plain[i : i + across])] if plain else []
    write(orders[:1], [sheet(rows)])
