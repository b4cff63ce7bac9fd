"""Replacing files atomically: whoever reads one sees the old file or the complete new one, also after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The path of a file to write beside `path`, which it replaces at the end, once it is on the disk; after an error
    it is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
