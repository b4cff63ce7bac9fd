"""Tables with paths or bytes of images and videos: lists of paths, JSONL, CSV and parquet."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mmspec import media
from mmspec.app.media.items import IMAGE, VIDEO, Item, Source, broken, file_item, kind_of, need
from mmspec.media import COPY_AGAIN, MediaError

if TYPE_CHECKING:  # an extra
    from pyarrow import Schema

LISTS, LINES, SHEETS, PARQUETS = {".txt", ".lst"}, {".jsonl", ".ndjson"}, {".csv", ".tsv"}, {".parquet"}
USUAL = (  # columns that are tried, in this order, if none is named
    *("image", "video", "file_name", "path", "image_path", "video_path", "filepath", "filename", "file", "img"),
    *("jpg", "png", "mp4", "picture"),
)
ONE_A_LINE = "write one path, or one row, a line"
NAME_IT = "name the column of paths or bytes with --column-image"
CHUNK = 4096  # rows of small columns read at once
ROWS = 16  # rows with bytes that a decoder process holds in memory at a time

Namer = Callable[[Path], str]


@dataclass(frozen=True)
class Columns:
    """The columns of a table with images or videos (None: try the usual names) and with captions."""

    image: str | None = None
    text: str | None = None

    def choose(
        self, names: Iterable[str], where: Path | str, typed: Mapping[str, str] | None = None, whole: bool = True
    ) -> tuple[str, str]:
        """The column of media in a table whose columns have these names, and its kind: IMAGE or VIDEO.

        Args:
            typed: columns that the table declares as "Image" or "Video".
            whole: whether the column of captions must be there; a single row may lack it.
        """
        names, typed = list(names), typed or {}
        there = f"it has {', '.join(map(repr, names))}"
        for wanted in (self.image, self.text if whole else None):
            if wanted and wanted not in names:
                raise MediaError(where, f"has no column {wanted!r}; {there}", "name another")
        usual = (self.image,) if self.image else (*typed, *(name for name in USUAL if name in names))
        if not usual:
            raise MediaError(where, f"has none of the usual columns; {there}", NAME_IT)
        column, low = usual[0], usual[0].lower()
        film = "video" in low or "clip" in low or kind_of(f"x.{low}") == VIDEO
        return column, VIDEO if typed.get(column) == "Video" or film else IMAGE

    def text_in(self, row: Mapping[str, object]) -> str | None:
        """The caption in a row."""
        return text_of(row.get(self.text)) if self.text else None


@dataclass(frozen=True)
class Container:
    """A file that holds or names several items; names of files are relative to its folder."""

    path: Path
    columns: Columns

    @property
    def root(self) -> Path:
        return self.path.parent


class TableRows(Container):
    """A text file whose lines name files: a list of paths, JSONL or CSV."""

    def items(self, name_of: Namer) -> Iterator[Item]:
        number = -1
        try:
            for number, row in enumerate(self._rows()):
                if number == 0 and isinstance(row, dict):
                    self.columns.choose(row, self.path)  # reports a misspelled column at once
                try:
                    yield self._item(row, f"{self.path}: row {number + 1}", name_of)
                except MediaError as error:
                    yield broken(f"{name_of(self.path)}/{number}", error)
        except (OSError, ValueError, csv.Error) as error:
            raise MediaError(self.path, f"cannot be read ({error})", "save it again as UTF-8 text") from error
        if number < 0:
            raise MediaError(self.path, "names no files", ONE_A_LINE)

    def _item(self, row: dict | str, where: str, name_of: Namer) -> Item:
        """The file that a row names; a list may name any file, since the user wrote it. MediaError for a bad row."""
        if isinstance(row, str):
            raise MediaError(where, row, ONE_A_LINE)
        cell = row[self.columns.choose(row, where, whole=False)[0]]
        cell = cell.get("path") if isinstance(cell, dict) else cell
        if self.path.suffix.lower() in LISTS:
            return file_item(self.root / media.path_of(cell, where), name_of)
        return file_item(media.below(self.root, cell, where), name_of, self.columns.text_in(row))

    def _rows(self) -> Iterator[dict | str]:
        """Each row as a dictionary, or a message that says what is wrong with it; a broken line affects no other.

        Bytes that are not UTF-8 are preserved in paths, since file names may contain them.
        """
        suffix = self.path.suffix.lower()
        ends = "" if suffix in SHEETS else None  # csv splits lines by itself
        with open(self.path, encoding="utf-8-sig", errors="surrogateescape", newline=ends) as file:
            if suffix in SHEETS:
                yield from _cells(file, "\t" if suffix == ".tsv" else ",")
            else:
                for line in filter(None, map(str.strip, file)):
                    yield {"path": line} if suffix in LISTS else json_object(line)


class Parquet(Container):
    """A parquet file with a column of paths, of bytes, or of {bytes, path}; only the workers read the bytes."""

    def items(self, name_of: Namer) -> Iterator[Item]:
        name, number = name_of(self.path), 0
        try:
            file = need("pyarrow.parquet", str(self.path)).ParquetFile(self.path, pre_buffer=False)
            column, paths, kind = self._column(file.schema_arrow)
            for group in range(file.num_row_groups):
                small = [name for name in (self.columns.text, column if paths else None) if name]
                batches = file.iter_batches(batch_size=CHUNK, row_groups=[group], columns=small, use_threads=False)
                for row, cells in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches)):
                    own, where = f"{name}/{number}", f"{self.path}: row {number + 1}"
                    existing = self.columns.text_in(cells)
                    number += 1
                    if not paths:
                        load = partial(_parquet_cell, self.path, group, row, column)
                        label = f"{self.path}: row {row + 1} of row group {group + 1}, column {column!r}"
                        yield Item(own, kind, cell_source(load, label, (self.root,), within=self.path), existing)
                        continue
                    try:
                        yield file_item(media.below(self.root, cells[column], where), name_of, existing)
                    except MediaError as error:
                        yield broken(own, error)
        except MediaError:
            raise
        except Exception as error:  # a damaged file may make the reader raise any error
            raise MediaError(self.path, f"is damaged ({type(error).__name__}: {error})", COPY_AGAIN) from error

    def _column(self, schema: Schema) -> tuple[str, bool, str]:
        """The column of media, whether it holds paths, and their kind (IMAGE or VIDEO)."""
        types = need("pyarrow", str(self.path)).types
        column, kind = self.columns.choose(schema.names, self.path)
        form = schema.field(column).type
        paths = types.is_string(form) or types.is_large_string(form)
        binary = types.is_binary(form) or types.is_large_binary(form)
        if not (paths or binary or (types.is_struct(form) and form.get_field_index("bytes") >= 0)):
            raise MediaError(self.path, f"column {column!r} holds {form}, not paths, bytes or {{bytes, path}}", NAME_IT)
        return column, paths, kind


def text_of(cell: object) -> str | None:
    """The caption in a cell, where a list is joined by commas; None if it is empty, or neither text nor a number."""
    if isinstance(cell, list):
        return ", ".join(filter(None, map(text_of, cell))) or None
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    return str(cell).encode("utf-8", "replace").decode().strip() or None


def json_object(line: bytes | str) -> dict | str:
    """The JSON object in a line, or a message that says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return row if isinstance(row, dict) else f"is JSON of a {type(row).__name__}, not an object with a path"


def _cells(file: TextIO, delimiter: str) -> Iterator[dict | str]:
    """The rows of a CSV file; a row that the reader refuses is a message, and the reader goes on after it."""
    rows = csv.DictReader(file, delimiter=delimiter, restkey="", restval="")
    while rows.fieldnames is not None:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"is not a row of a table ({error}); is a quote left open?"


def cell_source(load: Callable[[], object], label: str, folders: Sequence[Path], within: Path | None = None) -> Source:
    """The media in a cell, which holds bytes or names a file in one of these folders; `load` returns its content."""
    return Source(label, partial(_read_cell, load, label, folders), within=within)


def _read_cell(
    load: Callable[[], object], label: str, folders: Sequence[Path], max_bytes: int = media.MAX_BYTES
) -> bytes:
    try:
        content = load()
    except MediaError:
        raise
    except Exception as error:  # damaged files may make the libraries raise any error
        _cursor.cache_clear()
        raise MediaError(label, f"cannot be read ({type(error).__name__}: {error})", COPY_AGAIN) from error
    return media.cell(content, folders, label, max_bytes)


def _parquet_cell(table: Path, group: int, row: int, column: str) -> object:
    return _cursor(table, group, column).cell(row)


class _ColumnReader:
    """Reads a column of one row group forward, a few rows at a time, so that a large row group needs little memory."""

    def __init__(self, table: Path, group: int, column: str):
        self._file = need("pyarrow.parquet", str(table)).ParquetFile(table, pre_buffer=False, buffer_size=2**16)
        self._where = {"batch_size": ROWS, "row_groups": [group], "columns": [column], "use_threads": False}
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = ()
        self._first = 2**63  # row; after every row, so that the first call starts the reading

    def cell(self, row: int) -> Any:
        if row < self._first:
            self._batches, self._first, self._batch = self._file.iter_batches(**self._where), 0, ()
        while row >= self._first + len(self._batch):
            self._first += len(self._batch)
            self._batch = next(self._batches).column(0)
        return self._batch[row - self._first].as_py()


_cursor = lru_cache(maxsize=2)(_ColumnReader)
