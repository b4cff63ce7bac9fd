"""Replacing files atomically: whoever reads one sees the old file or the complete new one, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def replaced(path: Path, part: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """The path of a file to write, which replaces `path` at the end; after an error it is removed.

    Args:
        part: this file, on the same disk: one name per writer and file, by default by the process.
        durable: it is on the disk before it replaces the other.

    Raises:
        OSError: it cannot be written; also where torch.save or safetensors raise an error of their own.
    """
    part = part or path.with_name(f".{os.getpid()}-{zlib.crc32(os.fsencode(path.name)):08x}.partial")
    part.unlink(missing_ok=True)
    try:
        yield part
        if durable:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    except (RuntimeError, SafetensorError) as error:
        if type(error) not in (RuntimeError, SafetensorError):  # of memory, for example
            raise
        why = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise OSError(errno.EIO, f"cannot be written ({why})", str(path)) from error
    finally:
        part.unlink(missing_ok=True)
