"""One item to caption: its name, its kind, and the source from which a worker process reads its bytes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmspec import media
from mmspec.app.extras import installing
from mmspec.app.files import stamp
from mmspec.media import MediaError

IMAGE, VIDEO = "image", "video"
VIDEO_EXTENSIONS = {
    *(".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
    *(".mpeg", ".mpg", ".mts", ".ogv", ".webm", ".wmv"),
}
# (offset, bytes there, extension): how files begin, whatever their names; the first match counts
SIGNATURES = (
    (0, b"\xff\xd8\xff", ".jpg"),
    (0, b"\x89PNG\r\n\x1a\n", ".png"),
    (0, b"GIF8", ".gif"),
    (0, b"BM", ".bmp"),
    (0, b"II*\0", ".tif"),
    (0, b"MM\0*", ".tif"),
    (8, b"WEBP", ".webp"),
    (4, b"ftypavi", ".avif"),
    *((4, b"ftyp" + brand, ".heic") for brand in (b"hei", b"hev", b"mif1", b"msf1")),
    (4, b"ftyp", ".mp4"),
    (0, b"\x1aE\xdf\xa3", ".mkv"),
    (8, b"AVI ", ".avi"),
)
HEAD = 16  # bytes that `sniff` reads


@dataclass(frozen=True)
class Source:
    """Where the bytes of an item are; pickled for decoder processes, so it holds no open file.

    Attributes:
        label: describes the place for users; sources with the same label are the same item.
        read: returns all bytes, given the maximum number of bytes; MediaError if they cannot be read.
        path: the item's file on this machine, if it is a separate file.
        within: the tar or table that holds the item, if it is not.
        dated: changes when a remote file does.
    """

    label: str
    read: Callable[..., bytes]
    path: Path | None = None
    within: Path | None = None
    dated: str | None = None

    @property
    def stamp(self) -> str | None:
        """Changes if the content may have changed; an item with the same stamp need not be read again."""
        file = self.path or self.within
        return stamp(file) if file is not None else self.dated


@dataclass(frozen=True)
class Item:
    name: str  # unique in the run and the same in every run: "birds/1.jpg", "shard-000003.tar/0007", "rows.parquet/12"
    kind: str  # IMAGE or VIDEO
    source: Source
    existing: str | None = None  # the caption it came with


def file_source(path: Path) -> Source:
    return Source(os.path.abspath(path), partial(media.read, path), path)


def bytes_source(data: bytes) -> Source:
    return Source("bytes", partial(_given, data))


def broken(name: str, error: MediaError) -> Item:
    """An item that fails with this error when it is read."""
    return Item(name, IMAGE, Source(str(error), partial(_given, error)))


def _given(data: bytes | MediaError, max_bytes: int = media.MAX_BYTES) -> bytes:
    if isinstance(data, MediaError):
        raise data
    return data


def kind_of(name: str) -> str | None:
    """The kind of a file by its extension: IMAGE, VIDEO or None."""
    suffix = os.path.splitext(name)[1].lower()
    return IMAGE if suffix in media.EXTENSIONS else VIDEO if suffix in VIDEO_EXTENSIONS else None


def sniff(head: bytes) -> str | None:
    """The usual extension of a file that begins with these bytes; None if unknown."""
    return next((extension for place, mark, extension in SIGNATURES if head[place:].startswith(mark)), None)


def file_item(path: Path, name_of: Callable[[Path], str], existing: str | None = None) -> Item:
    """A file as an item, a picture if it has no known extension; errors come when it is read."""
    return Item(name_of(path), kind_of(path.name) or IMAGE, file_source(path), existing)


def need(module: str, what_for: str) -> Any:
    """Import a library of the extra `caption`; MediaError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MediaError(what_for, f"needs the library {module}", installing("caption")) from error
