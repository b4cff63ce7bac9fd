"""Append-only JSON-lines journals that survive a kill at any moment, and an index over several of them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]
FAILED = "failed"  # `status` of a line that says why there is no caption; a caption's line has none


def digest(data: bytes) -> str:
    """The sha256 of a content, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def key(content: str, **settings: object) -> str:
    """A hash of one piece of work: the digest of its content and everything that shapes the answer."""
    return digest(json.dumps([content, settings], sort_keys=True).encode())


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
        if fresh:
            _sync_folder(path.parent)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, *records: Record) -> None:
        """Write one line per record and wait until they are on the disk."""
        self._file.writelines(map(line_of, records))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Ledger:
    """Finds the newest line of every item in several journals; only the positions of the lines are in memory.

    `captions` and `failures` map names to positions; `get` and `failure` read the line. A failure older than a caption
    of the same item is dropped. Nothing is written; an incomplete last line is skipped.
    """

    def __init__(self, paths: Sequence[Path]):
        self.damaged = 0
        self.captions: dict[str, int] = {}
        self.failures: dict[str, int] = {}
        self._older: dict[str, list[int]] = {}  # positions of captions that newer ones replaced
        self._files = [open(path, "rb") for path in paths]  # noqa: SIM115
        for number, file in enumerate(self._files):
            self._load(number, file)

    def get(self, name: str) -> Record | None:
        """The caption of an item."""
        return self._read(self.captions[name]) if name in self.captions else None

    def failure(self, name: str) -> Record | None:
        """Why an item has no caption, if its last attempt failed."""
        return self._read(self.failures[name]) if name in self.failures else None

    def texts(self, name: str) -> set[str]:
        """All captions that the journals ever recorded for the item."""
        places = [*self._older.get(name, ()), *([self.captions[name]] if name in self.captions else [])]
        return {str(self._read(place).get("text")).strip() for place in places}

    def all_captions(self) -> Iterator[Record]:
        return (self._read(self.captions[name]) for name in sorted(self.captions))

    def all_failures(self) -> Iterator[Record]:
        return (self._read(self.failures[name]) for name in sorted(self.failures))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _load(self, number: int, file: BinaryIO) -> None:
        place = number << 48
        for line in file:
            record = parse(line)
            if record is not None and "file_name" in record:
                self._enter(str(record["file_name"]), place, record)
            elif line.strip():
                self.damaged += 1
            place += len(line)

    def _enter(self, name: str, place: int, record: Record) -> None:
        last = self.captions.get(name)
        if record.get("status") == FAILED:
            rivals = [rival for rival in (last, self.failures.get(name)) if rival is not None]
            if all(self._newer(place, record, rival) for rival in rivals):
                self.failures[name] = place
            return
        if last is not None and not self._newer(place, record, last):
            self._older.setdefault(name, []).append(place)
            return
        if last is not None:
            self._older.setdefault(name, []).append(last)
        self.captions[name] = place
        if name in self.failures and self._newer(place, record, self.failures[name]):
            del self.failures[name]

    def _newer(self, place: int, record: Record, rival: int) -> bool:
        """Lines of one journal are in order; lines of two journals are compared by their time stamps."""
        if place >> 48 == rival >> 48:
            return place > rival
        return time_of(record) >= time_of(self._read(rival))

    def _read(self, place: int) -> Record:
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


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file; none if it does not exist."""
    if path.is_file():
        with open(path, "rb") as file:
            yield from file


def time_of(record: Record) -> float:
    """When a line was written; 0 if it has no valid time stamp."""
    written = record.get("time")
    return float(written) if isinstance(written, int | float) and abs(written) < 2**63 else 0.0


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


def _heal(file: BinaryIO) -> None:
    """Cut off an incomplete last line, or end a complete one that lacks its newline; then seek to the end."""
    end = file.seek(0, os.SEEK_END)
    start = _last_line(file, end)
    file.seek(start)
    tail = file.read()
    if tail and parse(tail) is not None:
        file.write(b"\n")
    elif tail:
        file.truncate(start)
        file.seek(start)


def _last_line(file: BinaryIO, end: int) -> int:
    """Where the last line without a newline begins; `end` if there is none."""
    at = end
    while at > 0:
        first = max(0, at - 2**16)
        file.seek(first)
        newline = file.read(at - first).rfind(b"\n")
        if newline >= 0:
            return first + newline + 1
        at = first
    return 0


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable; Windows cannot open folders and does not need this."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
