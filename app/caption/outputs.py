"""The output folder of a captioning run: locks, journals, caption files, and files of earlier runs or other tools."""

from __future__ import annotations

import os
import posixpath
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from mmspec.app.caption import formats
from mmspec.app.caption.finals import FAILURES, Finals, OutputError
from mmspec.app.caption.journal import FAILED, Journal, Ledger, Record, digest, hold, line_of
from mmspec.app.files import replacing, write_whole
from mmspec.app.media.items import Item

STATE = ".mmspec"  # folder in the output folder: journals, locks, the resolved options
LONGEST = 2**20  # bytes of a caption file that are read; mmspec writes none that is longer
FINISHING = 600.0  # seconds to wait while another shard's run writes the final files
PATIENCE = 60.0  # seconds to wait while the last workers of a killed run are still writing


class UnwritableTextError(Exception):
    """A caption is in the journal, but its caption file cannot be written."""


class Sidecars:
    """Names of caption files: `x.txt`, or `x.jpg.txt` if two items would share the first. Case is ignored.

    All names must be added before the first call of `of`.
    """

    def __init__(self, extension: str = ".txt"):
        self.extension = extension
        self._stems: Counter[str] = Counter()
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        if name.casefold() not in self._names:
            self._names.add(name.casefold())
            self._stems[_stem(name).casefold()] += 1

    def of(self, name: str) -> str:
        """Path in the output folder. OutputError if the name points outside of it."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise OutputError(f"the name {name!r} points outside of the output folder; rename it")
        here = _stem(name).casefold()
        alone = self._stems[here] == 1 and (here == name.casefold() or here not in self._names)
        return (_stem(name) if alone else name) + self.extension

    def kept(self, record: Record | None, name: str) -> str:
        """The caption file of an item; an item keeps the one that an earlier run gave it."""
        before = (record or {}).get("sidecar")
        return before if before in (_stem(name) + self.extension, name + self.extension) else self.of(name)


class Writer:
    """Writes the results of one worker: first to its journal, which is authoritative, then to the caption file."""

    def __init__(self, folder: Path, slot: str):
        self.folder = folder
        self.journal = Journal(folder / STATE / f"{slot}.jsonl")
        self._partial = folder / STATE / f"{slot}.partial"

    def write(self, name: str, text: str, sidecar: str | None, facts: Record) -> None:
        """Record one caption, then write its caption file if it has one."""
        self.journal.append({"file_name": name, "text": text, "sidecar": sidecar, "time": time.time(), **facts})
        if sidecar is not None:
            write_text(self.folder, sidecar, text, self._partial)

    def fail(self, name: str, error: Exception, facts: Record) -> None:
        why = {"error": type(error).__name__, "message": str(error)}
        self.journal.append({"file_name": name, "status": FAILED, **why, "time": time.time(), **facts})

    def close(self) -> None:
        self.journal.close()


class Elsewhere(Protocol):
    """The interface of `Mirror`, which synchronizes a remote folder with the local one."""

    tars: list[str]

    def fetch_logs(self) -> object: ...


class Outputs:
    """The output folder in the planning process: locks it and reads all journals.

    `slots` is the prefix of this run's journal names; the run of a shard leaves the journals of other shards alone.
    `mirror` synchronizes a remote folder with this one.
    """

    def __init__(
        self, folder: Path, origin: str, slots: str = "", look_only: bool = False, overwrite: bool = False,
        mirror: Elsewhere | None = None,
    ):  # fmt: skip
        self.folder, self.origin, self.slots = folder, digest(os.fsencode(origin))[:16], slots
        self.state, self.look_only, self._mirror = folder / STATE, look_only, mirror
        self.finals = Finals(folder, self.state, overwrite, mirror.tars if mirror is not None else ())
        self._locks: list[int] = []
        try:
            if not look_only:
                self.state.mkdir(parents=True, exist_ok=True)
                self._lock()
            self.ledger = Ledger(self._journals())
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise OutputError(f"cannot write to {folder}: {reason}; choose another --out") from error
        except OutputError:
            self.close()
            raise

    def existing(self, name: str, sidecar: str | None) -> str | None:
        """The text of a caption file that mmspec did not write, or that was edited since."""
        text = self.text_of(sidecar) if sidecar else None
        return text if text and text not in self.ledger.texts(name) else None

    def restore(self, record: Record, sidecar: str, force: bool) -> bool:
        """Write the caption file of a recorded caption if it is missing or empty; true if it was written."""
        text, there = str(record["text"]), self.text_of(sidecar)
        if there == text.strip() or (there and not force and there not in self.ledger.texts(record["file_name"])):
            return False
        write_text(self.folder, sidecar, text, self.state / f"{self.slots}restore.partial")
        return True

    def text_of(self, sidecar: str) -> str | None:
        """The text of a caption file; None if it is missing, or a folder, pipe or device has its name."""
        path = self.folder / sidecar
        try:
            if not path.is_file():
                return None
            with open(path, "rb") as file:
                return file.read(LONGEST).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def finish(self, kinds: Collection[str], items: Callable[[], Iterable[Item]], most: int) -> list[Path]:
        """Write the final files from all journals, each in one step; returns their paths.

        Args:
            items: lists the items of the run; called only if needed.
            most: maximum bytes of an item, for webdataset.
        """
        if not self._alone("finish.lock", FINISHING):
            raise OutputError(f"another run is still finishing {self.folder}; run the command again")
        if self._mirror is not None:  # get the results of other shards
            self._mirror.fetch_logs()
        self.ledger.close()
        self.ledger = Ledger(self._journals())  # now with the workers' results
        self.finals.refuse_strangers(kinds)
        written: list[Path] = []
        for kind in kinds:
            if kind == "txt":
                continue  # written when the items were finished
            sources = {item.name: item.source for item in items()} if kind == "webdataset" else {}
            more = {"sources": sources, "max_bytes": most} if kind == "webdataset" else {}
            written += formats.FORMATS[kind](self.ledger.all_captions(), self.folder, note=self.finals.note, **more)
            if kind == "webdataset":
                self.finals.drop_shards(written)
        failures = self.folder / FAILURES
        lines = [line_of(record) for record in self.standing_failures(items)]
        if lines:
            with replacing(failures, self.finals.note) as file:
                file.writelines(lines)
        else:
            failures.unlink(missing_ok=True)
        return written

    def standing_failures(self, items: Callable[[], Iterable[Item]]) -> Iterator[Record]:
        """Failures of items that have no caption since, without those of files and rows that no longer exist."""
        named: set[str] | None = None
        for record in self.ledger.all_failures():
            path = record.get("path")
            there = os.path.lexists(str(path)) if path is not None else record.get("folder") != self.origin
            if not there and named is None:
                named = {item.name for item in items()}
            if there or record["file_name"] in (named or ()):
                yield record

    def close(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        for handle in self._locks:
            os.close(handle)
        self._locks.clear()

    def _journals(self) -> list[Path]:
        return sorted(self.state.glob("*.jsonl")) if self.state.is_dir() else []

    def _lock(self) -> None:
        """Lock the folder until `close` or the end of the process; wait for the last workers of a killed run."""
        whole = not self.slots
        taken = self._alone("run.lock", shared=not whole) and (whole or self._alone(f"{self.slots}.lock"))
        if not taken:
            raise OutputError(f"another mmspec caption writes to {self.folder}; wait for it or choose another --out")
        for path in self.state.glob(f"{self.slots}*.jsonl"):
            with open(path, "rb") as file:
                if not hold(file.fileno(), patience=PATIENCE):
                    raise OutputError(f"a worker of an earlier run still writes {path}; stop it, or wait for it")
        for path in self.state.glob(f"{self.slots}*.partial"):  # left by killed workers of an earlier run
            path.unlink(missing_ok=True)

    def _alone(self, name: str, patience: float = 0, shared: bool = False) -> bool:
        handle = os.open(self.state / name, os.O_RDWR | os.O_CREAT, 0o644)
        self._locks.append(handle)
        return hold(handle, shared, patience)


def write_text(folder: Path, sidecar: str, text: str, partial: Path) -> None:
    """Write a caption file in one step; the message of UnwritableTextError says where the caption is recorded."""
    path = folder / sidecar
    try:
        write_whole(path, f"{text}\n".encode(), partial, durable=False)  # can be restored from the journal
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror or error}"
        raise UnwritableTextError(f"{reason}; the caption itself is in {folder / STATE}") from error


def facts_of(**facts: object) -> Record:
    """The facts without empty ones (None or "")."""
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
