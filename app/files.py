"""A file that is written in one step: there as it was before, or whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, partial: Path | None = None, durable: bool = True) -> None:
    """Replace a file in one step: whoever looks sees the old content or the new one, never a part.

    `partial` is where it grows: one name per writer, on the same disk, so that a kill leaves no litter but this.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial or path.parent / ".mmspec.partial"
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:  # x: never through a link that somebody laid there
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    try:
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno != errno.EXDEV or partial.parent == path.parent:
            raise
        write_whole(path, data, durable=durable)  # a folder below is another disk
