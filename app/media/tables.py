"""Tables with paths or bytes of images and videos: lists of paths, JSONL, CSV and parquet."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mmspec import media
from mmspec.app.media.items import IMAGE, VIDEO, Item, ParquetSource, broken, file_item, kind_of, need
from mmspec.media import COPY_AGAIN, MediaError, OutsideError

if TYPE_CHECKING:  # an extra
    from pyarrow import Schema
    from pyarrow.parquet import ParquetFile

LISTS, LINES, SHEETS, PARQUETS = {".txt", ".lst"}, {".jsonl", ".ndjson"}, {".csv", ".tsv"}, {".parquet"}
EXTENSIONS = LISTS | LINES | SHEETS | PARQUETS
USUAL = (  # columns that are tried, in this order, if none is named
    *("image", "video", "file_name", "path", "image_path", "video_path", "filepath", "filename", "file", "img"),
    *("jpg", "png", "mp4", "picture"),
)
FORM = dict.fromkeys(LINES, "write one JSON object with a path a line")
NAME_IT = "name the column of paths or bytes with --column-image"
CHUNK = 4096  # rows of small columns read at once
LONGEST = 2**24  # maximum bytes of a line

Namer = Callable[[Path], str]


@dataclass(frozen=True)
class Columns:
    """The columns of a table with images or videos (None: try the usual names), captions, and tags."""

    image: str | None = None
    text: str | None = None
    tags: str | None = None

    def choose(
        self, names: Iterable[str], where: Path | str, media_columns: Iterable[str] = (), notes: bool = True
    ) -> str:
        """The column of images or videos in a table whose columns have these names; one row may lack its `notes`."""
        names = list(names)
        for wanted in filter(None, (self.image, *((self.text, self.tags) if notes else ()))):
            if wanted not in names:
                raise MediaError(
                    where, f"has no column {wanted!r}; it has {', '.join(map(repr, names))}", "name another"
                )
        usual = (self.image,) if self.image else (*media_columns, *(name for name in USUAL if name in names))
        if not usual:
            raise MediaError(where, f"has none of the usual columns; it has {', '.join(map(repr, names))}", NAME_IT)
        return usual[0]

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(filter(None, (self.text, self.tags))))

    def notes_of(self, row: Mapping[str, object]) -> tuple[str | None, tuple[str, ...]]:
        return text_of(row.get(self.text) if self.text else None), tags_of(row.get(self.tags) if self.tags else None)


@dataclass
class Strays:
    """Collects the rows of a table that name files outside of its folder; all of them are one failure, at the end."""

    table: str  # the name of the failing item
    first: OutsideError | None = None
    count: int = 0

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except OutsideError as error:
            self.first, self.count = self.first or error, self.count + 1

    def items(self) -> Iterator[Item]:
        if self.first is not None:
            more = f", and so {'do' if self.count > 2 else 'does'} {self.count - 1} more" if self.count > 1 else ""
            yield broken(self.table, self.first.path, self.first.reason + more, self.first.what_to_do)


@dataclass(frozen=True)
class Table:
    """A file whose rows have paths or bytes of images and videos."""

    path: Path
    columns: Columns

    @property
    def root(self) -> Path:
        return self.path.parent

    def _named(
        self, cell: object, own: str, where: str, name_of: Namer, notes: tuple[str | None, tuple[str, ...]]
    ) -> Item:
        """The file that a cell names, below the table's folder; a list may name any file, since the user wrote it."""
        try:
            if self.path.suffix.lower() in LISTS:
                return file_item(self.root / media.path_of(cell, where), name_of, *notes, named=where)
            return file_item(media.below(self.root, cell, where), name_of, *notes, named=where)
        except OutsideError:
            raise
        except MediaError as error:
            return broken(own, where, error.reason, error.what_to_do)


@dataclass(frozen=True)
class TableRows(Table):
    """A text file whose lines name files: a list of paths, JSONL or CSV. Paths are relative to the file's folder."""

    def check(self) -> None:
        try:
            first = next(self._rows(), None)
        except (OSError, ValueError, csv.Error) as error:
            raise self._unreadable(error) from error
        if first is None:
            raise MediaError(self.path, "names no files", "write one path, or one row, a line")
        if isinstance(first, dict):
            self.columns.choose(first, self.path)

    def items(self, name_of: Namer) -> Iterator[Item]:
        name = name_of(self.path)
        try:
            strays = Strays(name)
            for number, row in enumerate(self._rows()):
                with strays.collecting():
                    yield self._item(row, f"{name}/{number}", f"{self.path}: row {number + 1}", name_of)
            yield from strays.items()
        except (OSError, ValueError, csv.Error) as error:
            trouble = self._unreadable(error)
            yield broken(name, self.path, trouble.reason, trouble.what_to_do)

    def _item(self, row: dict | str, name: str, where: str, name_of: Namer) -> Item:
        if isinstance(row, str):
            return broken(name, where, row, FORM.get(self.path.suffix.lower(), "write one path, or one row, a line"))
        try:
            cell = row[self.columns.choose(row, where, notes=False)]
        except MediaError as error:
            return broken(name, where, error.reason, error.what_to_do)
        path = cell.get("path") if isinstance(cell, dict) else cell
        return self._named(path, name, where, name_of, self.columns.notes_of(row))

    def _rows(self) -> Iterator[dict | str]:
        """Each row as a dictionary, or a message that says what is wrong with it; a broken line affects no other.

        Bytes that are not UTF-8 are preserved in paths, since file names may contain them.
        """
        suffix = self.path.suffix.lower()
        with open(self.path, "rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError("it is UTF-16")
        if suffix in SHEETS:
            yield from self._cells("\t" if suffix == ".tsv" else ",")
            return
        with open(self.path, "rb") as file:
            for line in _lines(file):
                if line is None:
                    yield f"is longer than {LONGEST} bytes"
                elif suffix in LISTS:
                    yield {"path": line.decode("utf-8", "surrogateescape")}
                else:
                    yield json_object(line)

    def _cells(self, delimiter: str) -> Iterator[dict | str]:
        with open(self.path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = csv.DictReader(file, delimiter=delimiter, restkey="", restval="")
            if rows.fieldnames is None:
                return
            while True:
                try:
                    row: dict | str | None = next(rows, None)
                except csv.Error as error:  # the reader goes on after the line
                    row = f"is not a row of a table ({error}); is a quote left open?"
                if row is None:
                    return
                yield row

    def _unreadable(self, error: Exception) -> MediaError:
        return MediaError(self.path, f"cannot be read ({error})", "save it again as UTF-8 text")


@dataclass(frozen=True)
class Parquet(Table):
    """A parquet file with a column of paths, of bytes, or of {bytes, path}; only the workers read the bytes."""

    def check(self) -> None:
        self._column(self._open().schema_arrow)

    def items(self, name_of: Namer) -> Iterator[Item]:
        name = name_of(self.path)
        try:
            file = self._open()
            column, holds, kind = self._column(file.schema_arrow)
            number, strays = 0, Strays(name)
            for group in range(file.num_row_groups):
                small = self.columns.notes + [column] * (holds == "paths")
                for row, cells in enumerate(_small_columns(file, group, small)):
                    own, notes = f"{name}/{number}", self.columns.notes_of(cells)
                    if holds == "bytes":
                        yield Item(own, kind, ParquetSource(self.path, group, row, column), *notes)
                    else:
                        with strays.collecting():
                            yield self._named(cells[column], own, f"{self.path}: row {number + 1}", name_of, notes)
                    number += 1
            yield from strays.items()
        except MediaError as error:
            yield broken(name, self.path, error.reason, error.what_to_do)
        except Exception as error:  # a damaged file may make the reader raise any error
            yield broken(name, self.path, f"is damaged ({type(error).__name__}: {error})", COPY_AGAIN)

    def _open(self) -> ParquetFile:
        parquet = need("pyarrow.parquet", str(self.path))
        try:
            return parquet.ParquetFile(self.path, pre_buffer=False)
        except Exception as error:
            raise MediaError(self.path, f"is not a parquet file ({error})", COPY_AGAIN) from error

    def _column(self, schema: Schema) -> tuple[str, str, str]:
        """The column of media, whether it holds "paths" or "bytes", and their kind (IMAGE or VIDEO)."""
        types = need("pyarrow", str(self.path)).types
        notes: Any = json_object((schema.metadata or {}).get(b"huggingface", b"{}"))
        for part in ("info", "features"):
            notes = notes.get(part) if isinstance(notes, dict) else None
        features = notes if isinstance(notes, dict) else {}
        kinds = {name: entry.get("_type") for name, entry in features.items() if isinstance(entry, dict)}
        typed = {n: kind for n, kind in kinds.items() if kind in ("Image", "Video") and n in schema.names}
        column = self.columns.choose(schema.names, self.path, typed)
        kind = VIDEO if typed.get(column) == "Video" else kind_by_name(column)
        form = schema.field(column).type
        if types.is_string(form) or types.is_large_string(form):
            return column, "paths", kind
        if (
            types.is_binary(form)
            or types.is_large_binary(form)
            or (types.is_struct(form) and form.get_field_index("bytes") >= 0)
        ):
            return column, "bytes", kind
        raise MediaError(self.path, f"column {column!r} holds {form}, not paths, bytes or {{bytes, path}}", NAME_IT)


def kind_by_name(column: str) -> str:
    """The kind of the bytes in a column with this name: IMAGE or VIDEO."""
    low = column.lower()
    return VIDEO if "video" in low or "clip" in low or kind_of(f"x.{low}") == VIDEO else IMAGE


def tags_of(cell: object) -> tuple[str, ...]:
    """The tags in a cell, which is a list or a text with commas."""
    given = cell.split(",") if isinstance(cell, str) else cell if isinstance(cell, list | tuple) else ()
    return tuple(filter(None, map(text_of, given)))


def text_of(cell: object) -> str | None:
    """The caption or tag in a cell; None if it is empty, or neither text nor a number."""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    return str(cell).encode("utf-8", "replace").decode().strip() or None


def json_object(line: bytes | str) -> dict | str:
    """The JSON object in a line, or a message that says what is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"is not JSON ({error})"
    except RecursionError:
        return "is not JSON that can be read (nested too deep)"
    return row if isinstance(row, dict) else f"is JSON of a {type(row).__name__}, not an object"


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines that are not blank, without a byte order mark; None for one that is too long."""
    first = True
    while line := file.readline(LONGEST):
        whole = line.endswith(b"\n") or len(line) < LONGEST
        while not whole:
            rest = file.readline(LONGEST)
            whole = rest.endswith(b"\n") or len(rest) < LONGEST
            line = b""
        text = line.removeprefix(b"\xef\xbb\xbf").strip() if first else line.strip()
        first = False
        if text or not line:
            yield text or None


def _small_columns(file: ParquetFile, group: int, names: list[str]) -> Iterator[dict[str, object]]:
    if not names:
        yield from ({} for _ in range(file.metadata.row_group(group).num_rows))
        return
    for batch in file.iter_batches(batch_size=CHUNK, row_groups=[group], columns=names, use_threads=False):
        yield from batch.to_pylist()
