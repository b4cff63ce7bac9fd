"""A file that is written in one step: there as it was before, or whole; its stamp; a picture as an address."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from PIL import Image


@contextlib.contextmanager
def replacing(
    path: Path, note: Callable[[Path], None] | None = None, partial: Path | None = None, durable: bool = True
) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end: whoever looks sees the old one or all of the new.

    Args:
        note: told where a file is to be put, before it is there.
        partial: where it grows: one name per writer, on the same disk, so that a kill leaves no litter but this.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial or path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:  # x: never through a link that somebody laid there
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if note is not None:
            note(path)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes, partial: Path | None = None, durable: bool = True) -> None:
    """Replace a file in one step; in another one where `partial` is on another disk."""
    try:
        with replacing(path, None, partial or path.parent / ".mmspec.partial", durable) as file:
            file.write(data)
    except OSError as error:
        if error.errno != errno.EXDEV or partial is None or partial.parent == path.parent:
            raise
        write_whole(path, data, durable=durable)  # a folder below is another disk


def stamp(path: Path) -> str | None:
    """Size and time of a file, which change when it does; None where it cannot be looked at."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def inline(picture: Image.Image, kind: str = "PNG", **how: object) -> str:
    """A picture as an address that holds it."""
    into = io.BytesIO()
    picture.save(into, kind, **how)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(into.getvalue()).decode()}"
