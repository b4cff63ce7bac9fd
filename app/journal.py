"""Append-only files of JSON lines that survive a kill at any moment, and the key that says what a line answers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

Record = dict[str, Any]


def digest(data: bytes) -> str:
    """Name of a content: sha256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def key(content: str, **settings: Any) -> str:
    """Name of one piece of work: what was read (its digest) and everything that shapes the answer."""
    return digest(json.dumps([content, settings], sort_keys=True).encode())


class Journal:
    """One JSON object a line; `append` returns once the line is on the disk. Opening heals the end of the file.

    A kill can leave half a line behind: it is cut off. Lines that are not JSON objects (a disk that filled up with
    zeros, an editor) are left out of `records` and counted in `damaged`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.damaged = 0
        self.records: list[Record] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not os.path.lexists(path)
        if not fresh and not stat.S_ISREG(path.lstat().st_mode):  # a link could lead to any file of the user's
            raise OSError(errno.EINVAL, f"{path.name} there is a link or no file at all")
        self._file = open(path, "w+b" if fresh else "r+b")  # noqa: SIM115 - held open for the whole run
        self._heal()
        if fresh:
            _sync_folder(path.parent)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on the disk."""
        self._file.write(line_of(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(record)

    def compact(self, records: list[Record]) -> None:
        """Put `records` in the place of all lines, in one step (a kill leaves the old file or the new one)."""
        if records == self.records and not self.damaged:
            return
        self._file.close()
        write_whole(self.path, b"".join(map(line_of, records)))
        self._file = open(self.path, "r+b")  # noqa: SIM115
        self._file.seek(0, os.SEEK_END)
        self.records, self.damaged = list(records), 0

    def close(self) -> None:
        self._file.close()

    def _heal(self) -> None:
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            if _parse(data[whole:]) is not None:  # only the line's end is missing
                self._file.write(b"\n")
                whole = len(data) + 1
            else:
                self.damaged += 1
                self._file.truncate(whole)
        self._file.seek(whole)
        for line in data[:whole].split(b"\n"):
            record = _parse(line)
            if record is not None:
                self.records.append(record)
            elif line.strip():
                self.damaged += 1


def line_of(record: Record) -> bytes:
    """One line of UTF-8 JSON; file names that are no Unicode (possible on Linux) are written as escapes."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step: whoever looks sees the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / ".mmspec.partial"  # one name, so that a kill leaves no litter but this
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:  # x: never through a link that somebody laid there
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError
        return None
    return record if isinstance(record, dict) else None


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable; Windows cannot open folders and needs no such thing."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
