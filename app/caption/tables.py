"""Tables that name or hold images and videos: lists of paths, JSONL, CSV and parquet."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmspec.app.caption.items import IMAGE, VIDEO, Item, ParquetSource, broken, file_item, kind_of, need
from mmspec.app.caption.media import COPY_AGAIN, MediaError

LISTS, LINES, SHEETS, PARQUETS = {".txt", ".lst"}, {".jsonl", ".ndjson"}, {".csv", ".tsv"}, {".parquet"}
EXTENSIONS = LISTS | LINES | SHEETS | PARQUETS
USUAL: tuple[str, ...] = (
    "image",
    "video",
    "file_name",
    "path",
    "image_path",
    "video_path",
    "filepath",
    "filename",
    "file",
    "img",
)
USUAL += ("jpg", "png", "mp4", "picture")  # columns that are tried, in this order, when none is named
NAME_IT = "name the column of paths or bytes with --column-image"
CHUNK = 4096  # rows of small columns read at once

Namer = Callable[[Path], str]


@dataclass(frozen=True)
class Columns:
    """Where a table has its images or videos (None: the usual names are tried), their captions and their tags."""

    image: str | None = None
    text: str | None = None
    tags: str | None = None

    def choose(self, there: Iterable[str], where: Path | str, media_columns: Iterable[str] = ()) -> str:
        """The column of images or videos in a table that has the columns `there`."""
        there = list(there)
        for wanted in filter(None, (self.image, self.text, self.tags)):
            if wanted not in there:
                raise MediaError(
                    where, f"has no column {wanted!r}; it has {', '.join(map(repr, there))}", "name another"
                )
        usual = (self.image,) if self.image else (*media_columns, *(name for name in USUAL if name in there))
        if not usual:
            raise MediaError(where, f"has none of the usual columns; it has {', '.join(map(repr, there))}", NAME_IT)
        return usual[0]

    @property
    def notes(self) -> list[str]:
        """The columns beside the image that are wanted."""
        return list(dict.fromkeys(filter(None, (self.text, self.tags))))

    def said(self, row: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
        """Caption and tags of a row."""
        text = row.get(self.text) if self.text else None
        return (str(text) if text else None), tags_of(row.get(self.tags) if self.tags else None)


@dataclass(frozen=True)
class Rows:
    """A text file whose lines name files: a list of paths, JSONL or CSV. Relative paths start at its own folder."""

    path: Path
    columns: Columns

    @property
    def root(self) -> Path:
        return self.path.parent

    @cached_property
    def count(self) -> int | None:
        if self.path.suffix.lower() in SHEETS:  # a cell may hold line breaks
            return None
        with open(self.path, "rb") as file:
            return sum(1 for line in file if line.strip())

    def check(self) -> None:
        """MediaError if the file cannot be read, is empty or lacks a column."""
        try:
            first = next(self._rows(), None)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise self._unreadable(error) from error
        if first is None:
            raise MediaError(self.path, "names no files", "write one path, or one row, a line")
        if isinstance(first, dict):
            self.columns.choose(first, self.path)

    def items(self, name_of: Namer) -> Iterator[Item]:
        name = name_of(self.path)
        try:
            for number, row in enumerate(self._rows()):
                yield self._item(row, f"{name}/{number}", name_of)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            trouble = self._unreadable(error)
            yield broken(name, self.path, trouble.reason, trouble.what_to_do)

    def _item(self, row: dict | str, name: str, name_of: Namer) -> Item:
        where = f"{self.path}: row {name.rpartition('/')[2]}"
        if isinstance(row, str):
            return broken(name, where, row, "one JSON object with a path a line")
        try:
            cell = row[self.columns.choose(row, where)]
        except MediaError as error:
            return broken(name, where, error.reason, error.what_to_do)
        path = cell.get("path") if isinstance(cell, dict) else cell
        wrong = _wrong_path(path)
        if wrong:
            return broken(name, where, *wrong)
        return file_item(self.path.parent / str(path), name_of, *self.columns.said(row))

    def _rows(self) -> Iterator[dict | str]:
        """A row as a dictionary, or what is wrong with it."""
        suffix = self.path.suffix.lower()
        with open(self.path, encoding="utf-8-sig", newline="") as file:
            if suffix in SHEETS:
                yield from csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ",", restkey="", restval="")
                return
            for line in map(str.strip, file):
                if line:
                    yield {"path": line} if suffix in LISTS else _json(line)

    def _unreadable(self, error: Exception) -> MediaError:
        return MediaError(self.path, f"cannot be read ({error})", "save it again as UTF-8 text")


@dataclass(frozen=True)
class Parquet:
    """A parquet file with a column of paths, of bytes, or of {bytes, path}; pictures in it are left to the workers."""

    path: Path
    columns: Columns

    @property
    def root(self) -> Path:
        return self.path.parent

    @cached_property
    def count(self) -> int | None:
        return self._open().metadata.num_rows

    def check(self) -> None:
        """MediaError if the file cannot be read or has no such column."""
        self._column(self._open().schema_arrow)

    def items(self, name_of: Namer) -> Iterator[Item]:
        name = name_of(self.path)
        try:
            file = self._open()
            column, holds, kind = self._column(file.schema_arrow)
            number = 0
            for group in range(file.num_row_groups):
                small = self.columns.notes + [column] * (holds == "paths")
                for row, cells in enumerate(_small_columns(file, group, small)):
                    own, (text, tags) = f"{name}/{number}", self.columns.said(cells)
                    if holds == "bytes":
                        yield Item(own, kind, ParquetSource(self.path, group, row, column), text, tags)
                    elif wrong := _wrong_path(cells[column]):
                        yield broken(own, f"{self.path}: row {number}", *wrong)
                    else:
                        yield file_item(self.path.parent / cells[column], name_of, text, tags)
                    number += 1
        except MediaError as error:
            yield broken(name, self.path, error.reason, error.what_to_do)
        except Exception as error:  # a reader fed with a damaged file may raise anything at all
            yield broken(name, self.path, f"is damaged ({type(error).__name__}: {error})", COPY_AGAIN)

    def _open(self) -> Any:
        parquet = need("pyarrow.parquet", str(self.path))
        try:
            return parquet.ParquetFile(self.path, pre_buffer=False)
        except Exception as error:
            raise MediaError(self.path, f"is not a parquet file ({error})", COPY_AGAIN) from error

    def _column(self, schema: Any) -> tuple[str, str, str]:
        """The column, what it holds ("paths" or "bytes"), and of which kind that is."""
        types = need("pyarrow", str(self.path)).types
        notes = _json((schema.metadata or {}).get(b"huggingface", b"{}").decode("utf-8", "replace"))
        features = notes.get("info", {}).get("features", {}) if isinstance(notes, dict) else {}
        typed = {
            name: found["_type"] for name, found in features.items() if _media_type(found) and name in schema.names
        }
        column = self.columns.choose(schema.names, self.path, typed)
        kind = VIDEO if typed.get(column) == "Video" else kind_by_name(column)
        form = schema.field(column).type
        if types.is_string(form) or types.is_large_string(form):
            return column, "paths", kind
        if types.is_binary(form) or types.is_large_binary(form) or (types.is_struct(form) and _has_bytes(form)):
            return column, "bytes", kind
        raise MediaError(self.path, f"column {column!r} holds {form}, not paths, bytes or {{bytes, path}}", NAME_IT)


def kind_by_name(column: str) -> str:
    """What bytes in a column of that name are: IMAGE or VIDEO."""
    low = column.lower()
    return VIDEO if "video" in low or "clip" in low or kind_of(f"x.{low}") == VIDEO else IMAGE


def tags_of(cell: Any) -> tuple[str, ...]:
    """Tags in a cell: a list of them, or a text with commas."""
    given = cell.split(",") if isinstance(cell, str) else cell if isinstance(cell, list | tuple) else ()
    return tuple(filter(None, (str(tag).strip() for tag in given)))


def _wrong_path(cell: Any) -> tuple[str, str] | None:
    """What is wrong with a cell that should be a path, and what to do about it."""
    try:
        possible = isinstance(cell, str) and cell.strip() and b"\0" not in os.fsencode(cell)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        return f"has {str(cell)[:60]!r} in place of a path", "write the path of a file"
    if "://" in cell:
        return f"{cell[:200]} is on the web", "download it first, for instance with img2dataset"
    return None


def _json(line: str) -> dict | str:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"is not JSON ({error})"
    return row if isinstance(row, dict) else f"is JSON of a {type(row).__name__}, not an object"


def _small_columns(file: Any, group: int, names: list[str]) -> Iterator[dict[str, Any]]:
    if not names:
        yield from ({} for _ in range(file.metadata.row_group(group).num_rows))
        return
    for batch in file.iter_batches(batch_size=CHUNK, row_groups=[group], columns=names, use_threads=False):
        yield from batch.to_pylist()


def _media_type(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("_type") in ("Image", "Video")


def _has_bytes(form: Any) -> bool:
    return form.get_field_index("bytes") >= 0
