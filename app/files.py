"""Writes files atomically, reads their stamps, and encodes pictures as data URLs."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from PIL import Image


@contextlib.contextmanager
def replacing(path: Path, partial: Path | None = None, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that replaces `path` at the end: readers see the old file or the complete new one.

    Args:
        partial: the temporary file, on the same disk: one name per writer and file, by default by the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial or path.with_name(f".{os.getpid()}-{zlib.crc32(os.fsencode(path.name)):08x}.partial")
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:  # x: never write through an existing link
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes, partial: Path | None = None, durable: bool = True) -> None:
    """Replace a file in one step."""
    with replacing(path, partial, durable) as file:
        file.write(data)


def stamp(path: Path) -> str | None:
    """Size and modification time of a file, which change when the file does; None if it cannot be read."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def inline(picture: Image.Image, kind: str = "PNG", **how: object) -> str:
    """A picture as a data URL."""
    into = io.BytesIO()
    picture.save(into, kind, **how)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(into.getvalue()).decode()}"
