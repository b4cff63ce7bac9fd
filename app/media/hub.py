"""Data sets of the Hub, or of a folder in its format; pictures in them are not decoded here."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from mmspec import media
from mmspec.app.media.items import Item, need
from mmspec.app.media.tables import Columns, cell_source
from mmspec.media import MediaError

SPLIT = "train"  # where nothing names a split


@dataclass(frozen=True)
class Dataset:
    """A data set by its address: `hf:owner/name` or `hf:owner/name/config:split`.

    Attributes:
        split: where the address names none; None: all of them.
    """

    where: str
    columns: Columns
    split: str | None = None
    root: ClassVar[None] = None

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        parts = self.parts
        address = self.where.removeprefix("hf:").partition(":")[0]
        folders = tuple(media.dataset_folders(address))
        whole = Path(address).resolve().name if Path(address).is_dir() else address
        for split, part in parts.items():
            name, (column, kind) = f"{whole}/{split}", self._column(part)
            pickled = pickle.dumps(part.select_columns([column]))
            texts = part.select_columns([self.columns.text]) if self.columns.text else itertools.repeat({}, len(part))
            for row, cells in enumerate(texts):
                label = f"{name}: row {row + 1}, column {column!r}"
                source = cell_source(partial(_cell, pickled, row, column), label, folders)
                yield Item(f"{name}/{row}", kind, source, self.columns.text_in(cells))

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The chosen splits, with decoding turned off."""
        datasets = need("datasets", self.where)
        address, _, named = self.where.removeprefix("hf:").partition(":")
        split = named or self.split
        try:
            loaded = datasets.load_dataset(*_name_and_config(address), split=split)
        except Exception as error:  # no network, no such data set or split, a damaged cache; the message says which
            reason = f"cannot be loaded ({type(error).__name__}: {error})"
            raise MediaError(self.where, reason, "check the name (owner/name:split) and the network") from error
        parts = dict(loaded) if isinstance(loaded, dict) else {split or str(loaded.split or SPLIT): loaded}
        return {split: _undecoded(part) for split, part in parts.items()}

    def _column(self, part: Any) -> tuple[str, str]:
        typed = {name: type(feature).__name__ for name, feature in part.features.items()}
        typed = {name: kind for name, kind in typed.items() if kind in ("Image", "Video")}
        return self.columns.choose(part.column_names, self.where, typed)


def _cell(pickled: bytes, row: int, column: str) -> object:
    """The content of a cell; the data set is pickled as paths, without the pictures."""
    return _dataset(pickled)[row][column]


_dataset = lru_cache(maxsize=4)(pickle.loads)


def _name_and_config(address: str) -> tuple[str, str | None]:
    """Split `owner/name/config` into name and config; the path of a folder, which need not exist, has no config."""
    parts = address.split("/", 2)
    folder = address.startswith(("/", ".", "~")) or Path(address).is_absolute() or Path(address).is_dir()
    return (address, None) if len(parts) < 3 or folder else ("/".join(parts[:2]), parts[2])


def _undecoded(part: Any) -> Any:
    for name, feature in part.features.items():
        listed = isinstance(feature, list)
        inner = feature[0] if listed else getattr(feature, "feature", feature)  # of a list of pictures
        if getattr(inner, "decode", False):
            raw = type(inner)(decode=False)
            part = part.cast_column(name, raw if inner is feature else [raw])
    return part
