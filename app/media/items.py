"""One item to caption: its name, its kind, and the source from which a worker process reads its bytes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mmspec import media
from mmspec.app.extras import installing
from mmspec.media import COPY_AGAIN, MediaError

IMAGE, VIDEO = "image", "video"
VIDEO_EXTENSIONS = {
    *(".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
    *(".mpeg", ".mpg", ".mts", ".ogv", ".webm", ".wmv"),
}
# (offset, bytes there, kind, extension): how files begin, whatever their names; the first match counts
SIGNATURES = (
    (0, b"\xff\xd8\xff", IMAGE, ".jpg"),
    (0, b"\x89PNG\r\n\x1a\n", IMAGE, ".png"),
    (0, b"GIF8", IMAGE, ".gif"),
    (0, b"BM", IMAGE, ".bmp"),
    (0, b"II*\0", IMAGE, ".tif"),
    (0, b"MM\0*", IMAGE, ".tif"),
    *((0, b"P%d%c" % (digit, blank), IMAGE, ".ppm") for digit in range(1, 7) for blank in b"\n\r\t "),
    (8, b"WEBP", IMAGE, ".webp"),
    (4, b"ftypavi", IMAGE, ".avif"),
    *((4, b"ftyp" + brand, IMAGE, ".heic") for brand in (b"hei", b"hev", b"mif1", b"msf1")),
    (4, b"ftyp", VIDEO, ".mp4"),
    (0, b"\x1aE\xdf\xa3", VIDEO, ".mkv"),
    (8, b"AVI ", VIDEO, ".avi"),
    (0, b"\0\0\1\xba", VIDEO, ".mpg"),
    (0, b"\0\0\1\xb3", VIDEO, ".mpg"),
    (0, b"FLV\1", VIDEO, ".flv"),
    (0, b"OggS", VIDEO, ".ogv"),
)
HEAD = 16  # bytes that `sniff` reads
ROWS = 16  # rows of a parquet file that a worker holds in memory at a time


class Source(Protocol):
    """Where the bytes of an item are; pickled for worker processes, so it holds no open file.

    Its `str` describes the place for users; sources with the same `str` are the same item.
    """

    @property
    def path(self) -> Path | None:
        """The item's file on this machine, if it is a separate file."""

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        """All bytes; MediaError if they cannot be read, or are more than `max_bytes`."""


@dataclass(frozen=True)
class Item:
    name: str  # unique in the run and the same in every run: "birds/1.jpg", "shard-000003.tar/0007", "rows.parquet/12"
    kind: str  # IMAGE or VIDEO
    source: Source
    existing: str | None = None  # the caption it came with
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileSource:
    """A file, and the row of the table that names it, if any."""

    path: Path
    named: str = ""

    def __str__(self) -> str:
        return os.path.abspath(self.path)

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        try:
            return media.read(self.path, max_bytes)
        except MediaError as error:
            if not self.named:
                raise
            raise MediaError(error.path, f"{error.reason} (named in {self.named})", error.what_to_do) from error


@dataclass(frozen=True)
class BytesSource:
    data: bytes
    path: ClassVar[None] = None

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        return self.data


@dataclass(frozen=True)
class TarSource:
    """A member of an uncompressed tar, read by its offset without another pass over the tar."""

    tar: Path
    member: str
    offset: int
    size: int
    path: ClassVar[None] = None

    def __str__(self) -> str:
        return f"{self.tar}: {self.member} at byte {self.offset}"

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        media.check_bytes(self.size, str(self), max_bytes)
        try:
            with open(self.tar, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise MediaError(self.tar, f"cannot be read ({error.strerror or error})", "check the disk") from error
        if not data or len(data) < self.size:
            reason = "is cut off" if self.size else "is empty (0 bytes)"
            raise MediaError(str(self), reason, COPY_AGAIN)
        return data


@dataclass(frozen=True)
class ParquetSource:
    """A cell of a parquet file, by row group and row in it: bytes, or {bytes, path}, the image format of `datasets`."""

    table: Path
    group: int
    row: int
    column: str
    path: ClassVar[None] = None

    def __str__(self) -> str:
        return f"{self.table}: row {self.row + 1} of row group {self.group + 1}, column {self.column!r}"

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        try:
            cell = _cursor(self.table, self.group, self.column).cell(self.row)
        except MediaError:
            raise
        except Exception as error:  # a damaged file may make the reader raise any error
            _cursor.cache_clear()
            raise MediaError(str(self), f"cannot be read ({type(error).__name__}: {error})", COPY_AGAIN) from error
        return media.cell(cell, [self.table.parent], str(self), max_bytes)


@dataclass(frozen=True)
class DatasetSource:
    """A row of a data set of the `datasets` library, which is pickled as paths, without the pictures."""

    name: str
    dataset: bytes
    row: int
    column: str
    folders: tuple[Path, ...] = ()  # a row may name files below these
    path: ClassVar[None] = None

    def __str__(self) -> str:
        return f"{self.name}: row {self.row + 1}, column {self.column!r}"

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        try:
            cell = _dataset(self.dataset)[self.row][self.column]
        except Exception as error:  # any error of the library on a damaged disk or cache
            raise MediaError(str(self), f"cannot be read ({type(error).__name__}: {error})", COPY_AGAIN) from error
        return media.cell(cell, self.folders, str(self), max_bytes)


@dataclass(frozen=True)
class BrokenSource:
    """An input that cannot be opened; the run records the error and goes on."""

    error: MediaError
    path: ClassVar[None] = None

    def __str__(self) -> str:
        return str(self.error)

    def read(self, max_bytes: int = media.MAX_BYTES) -> bytes:
        raise self.error


def kind_of(name: str) -> str | None:
    """The kind of a file by its extension: IMAGE, VIDEO or None."""
    suffix = os.path.splitext(name)[1].lower()
    return IMAGE if suffix in media.EXTENSIONS else VIDEO if suffix in VIDEO_EXTENSIONS else None


def sniff(head: bytes) -> tuple[str, str] | None:
    """Kind and usual extension of a file that begins with these bytes; None if unknown."""
    fitting = (entry for entry in SIGNATURES if head[entry[0] :].startswith(entry[1]))
    return next(((kind, extension) for *_, kind, extension in fitting), None)


def file_item(
    path: Path, name_of: Callable[[Path], str], existing: str | None = None, tags: tuple = (), named: str = ""
) -> Item:
    """A file as an item; its first bytes decide its kind if its extension is unknown. Errors come when it is read."""
    kind = kind_of(path.name)
    if kind is None:
        try:
            with open(path, "rb") as file:
                kind, _ = sniff(file.read(HEAD)) or (IMAGE, "")
        except (OSError, ValueError):  # ValueError: a list has an invalid path
            kind = IMAGE
    return Item(name_of(path), kind, FileSource(path, named), existing, tags)


def broken(name: str, where: Path | str, reason: str, what_to_do: str) -> Item:
    """An item that fails with this error when it is read."""
    return Item(name, IMAGE, BrokenSource(MediaError(where, reason, what_to_do)))


def need(module: str, what_for: str) -> Any:
    """Import a library of the extra `caption`; MediaError if it is missing."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MediaError(what_for, f"needs the library {module}", installing("caption")) from error


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


@lru_cache(maxsize=4)
def _dataset(pickled: bytes) -> Any:
    return pickle.loads(pickled)
