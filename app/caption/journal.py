"""Append-only JSON-lines journals that survive a kill at any moment, and an index over several of them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mmspec.app.files import hold

Record = dict[str, Any]
STATE = ".mmspec"  # folder in the output folder: journals, locks, partial files
FAILED = "failed"  # `status` of a line that says why there is no caption; a caption's line has none
LONGEST = 2**24  # bytes of a last line that are checked for completeness; no line of ours is longer


def digest(data: bytes) -> str:
    """The sha256 of a content, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def key(**settings: object) -> str:
    """A hash of everything that shapes an answer besides the item's content."""
    return digest(json.dumps(["", settings], sort_keys=True).encode())


def facts_of(**facts: object) -> Record:
    """The facts without empty ones (None or "")."""
    return {name: value for name, value in facts.items() if value not in (None, "")}


class Journal:
    """One JSON object a line; `append` returns once the line is on the disk. Only one process can open a journal.

    A kill can leave half a line behind, which is cut off when the journal is opened. Lines that are not JSON objects
    (a disk that filled up with zeros, an editor) stay, and `Ledger` skips them.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not os.path.lexists(path)
        if not fresh and not stat.S_ISREG(path.lstat().st_mode):  # a link could point to any file of the user
            raise OSError(errno.EINVAL, f"{path.name} is a link or not a regular file")
        self._file = open(path, "w+b" if fresh else "r+b")  # noqa: SIM115 - held open for the whole run
        if not hold(self._file.fileno()):
            self._file.close()
            raise OSError(errno.EBUSY, f"another process writes to {path.name}")
        _heal(self._file)
        if fresh and os.name == "posix":  # make its name durable, too; Windows cannot open folders
            handle = os.open(path.parent, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on the disk."""
        self._file.write(line_of(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Ledger:
    """Finds the lines of every item in several journals; only the positions of the lines are in memory.

    Nothing is written; lines that are not records, such as an incomplete last one, are counted in `damaged`.
    """

    def __init__(self, paths: Sequence[Path]):
        self.damaged = 0
        self._lines: dict[str, list[int]] = {}  # positions by item, in the order of time; ~position for a failure
        self._files = [open(path, "rb") for path in paths]  # noqa: SIM115
        for number, file in enumerate(self._files):
            place = number << 48
            for line in file:
                record = parse(line)
                if record is not None and "file_name" in record:
                    self._enter(str(record["file_name"]), place, record)
                elif line.strip():
                    self.damaged += 1
                place += len(line)

    def get(self, name: str) -> Record | None:
        """The newest caption of an item."""
        return next((self._read(place) for place in reversed(self._lines.get(name, [])) if place >= 0), None)

    def failure(self, name: str) -> Record | None:
        """Why the last attempt at an item failed; None if it did not."""
        last = self._lines.get(name, [0])[-1]
        return self._read(last) if last < 0 else None

    def texts(self, name: str) -> set[str]:
        """All captions that the journals ever recorded for the item."""
        return {str(self._read(place).get("text")).strip() for place in self._lines.get(name, ()) if place >= 0}

    def captioned(self) -> list[str]:
        """Names of the items that have a caption, sorted."""
        return sorted(name for name, places in self._lines.items() if max(places) >= 0)

    def all_captions(self) -> Iterator[Record]:
        return (self.get(name) or {} for name in self.captioned())

    def all_failures(self) -> Iterator[Record]:
        return (self._read(places[-1]) for _, places in sorted(self._lines.items()) if places[-1] < 0)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _enter(self, name: str, place: int, record: Record) -> None:
        places = self._lines.setdefault(name, [])
        at = len(places)
        while at and not self._newer(place, record, places[at - 1]):
            at -= 1
        places.insert(at, ~place if record.get("status") == FAILED else place)

    def _newer(self, place: int, record: Record, rival: int) -> bool:
        """Lines of one journal are in order; lines of two journals are compared by their time stamps."""
        return place >> 48 == max(rival, ~rival) >> 48 or time_of(record) >= time_of(self._read(rival))

    def _read(self, place: int) -> Record:
        place = max(place, ~place)
        file = self._files[place >> 48]
        file.seek(place & (1 << 48) - 1)
        return parse(file.readline()) or {}


def line_of(record: Record) -> bytes:
    """One line of UTF-8 JSON; file names that are not valid Unicode (possible on Linux) are escaped."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def parse(line: bytes) -> Record | None:
    """The JSON object in a line, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
    return record if isinstance(record, dict) else None


def time_of(record: Record) -> float:
    """When a line was written; 0 if it has no valid time stamp."""
    written = record.get("time")
    return float(written) if isinstance(written, int | float) and abs(written) < 2**63 else 0.0


def _heal(file: BinaryIO) -> None:
    """Cut off an incomplete last line, or end a complete one that lacks its newline; then seek to the end."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - LONGEST))
    tail = file.read().rpartition(b"\n")[2]
    if tail and parse(tail) is None:
        file.truncate(end - len(tail))
    file.seek(0, os.SEEK_END)
    if tail and parse(tail) is not None:
        file.write(b"\n")
