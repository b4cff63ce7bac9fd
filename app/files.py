"""Writes files atomically, locks them, reads their stamps, and encodes pictures as data URLs."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mmspec.app.extras import EngineError
from mmspec.replacing import replaced

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from PIL import Image


@contextlib.contextmanager
def replacing(path: Path, partial: Path | None = None, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write in place of `path`, in a folder that is made if need be; see `replaced`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, partial, durable) as part, open(part, "xb") as file:  # x: never write through an existing link
        yield file


def write_whole(path: Path, data: bytes, partial: Path | None = None, durable: bool = True) -> None:
    """Replace a file in one step."""
    with replacing(path, partial, durable) as file:
        file.write(data)


def check_writable(path: Path) -> None:
    """EngineError, before any work is done, if a file cannot be written at this place; nothing is made there."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
        with tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())):
            pass
    except OSError as error:
        raise EngineError(f"cannot write {str(path)!r}: {error.strerror}") from error


def stamp(path: Path) -> str | None:
    """Size and modification time of a file, which change when the file does; None if it cannot be read."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def hold(handle: int, shared: bool = False, patience: float = 0) -> bool:
    """Lock an open file until it is closed or the process ends; false if it is still taken after `patience` seconds."""
    if fcntl is None:
        return True
    give_up = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.05)
        except OSError:  # a network file system without locks
            return True


def inline(picture: Image.Image, kind: str = "PNG", **how: object) -> str:
    """A picture as a data URL."""
    into = io.BytesIO()
    picture.save(into, kind, **how)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(into.getvalue()).decode()}"
