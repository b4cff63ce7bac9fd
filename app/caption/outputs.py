"""The output folder of a captioning run: locks, journals, caption files, and which files a run may replace."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePosixPath

from mmspec.app.caption import formats
from mmspec.app.caption.journal import FAILED, STATE, Journal, Ledger, Record, digest, line_of, parse
from mmspec.app.files import hold, write_whole
from mmspec.app.media.items import Item, need
from mmspec.media import MediaError

FAILURES = "failed.jsonl"  # written by every run in which something failed
FILE = "run.yaml"  # the settings of the run, beside the captions
LOG = "finals.log"  # in STATE: names of the files that runs wrote, one JSON object a line
SHARD = re.compile(r"webdataset/\d+\.tar")
LONGEST = 2**20  # bytes of a caption file that are read; mmspec writes none that is longer
FINISHING = 600.0  # seconds to wait while another shard's run writes the final files
PATIENCE = 60.0  # seconds to wait while the last workers of a killed run are still writing


class OutputError(Exception):
    """The output folder cannot be used."""


class Sidecars:
    """Names of caption files: `x.txt`, or `x.jpg.txt` if two items would share the first. Case is ignored.

    All names must be added before the first call of `of`.
    """

    def __init__(self) -> None:
        self._stems: Counter[str] = Counter()
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        if name.casefold() not in self._names:
            self._names.add(name.casefold())
            self._stems[_stem(name).casefold()] += 1

    def of(self, name: str, record: Record | None = None) -> str:
        """Path in the output folder; an item keeps the one of its record. OutputError if it would lead outside."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise OutputError(f"the name {name!r} points outside of the output folder; rename it")
        stem = _stem(name)
        before = (record or {}).get("sidecar")
        if before in (f"{stem}.txt", f"{name}.txt"):
            return str(before)
        here = stem.casefold()
        alone = self._stems[here] == 1 and (here == name.casefold() or here not in self._names)
        return f"{stem if alone else name}.txt"


class Writer:
    """Writes the results of one worker: first to its journal, which is authoritative, then to the caption file."""

    def __init__(self, folder: Path, slot: str):
        self.folder = folder
        self.journal = Journal(folder / STATE / f"{slot}.jsonl")
        self._partial = folder / STATE / f"{slot}.partial"

    def write(self, name: str, text: str, sidecar: str | None, facts: Record) -> Record:
        """Record one caption, then write its caption file if it has one.

        Returns the record, with `error` and `message` if the caption file cannot be written.
        """
        record = {"file_name": name, "text": text, "sidecar": sidecar, "time": time.time(), **facts}
        self.journal.append(record)
        try:
            if sidecar is not None:
                write_text(self.folder, sidecar, text, self._partial)
        except OSError as error:
            return record | {"error": type(error).__name__, "message": str(error)}
        return record

    def fail(self, name: str, error: Exception, facts: Record) -> Record:
        """Record why an item has no caption; returns the record, whose message names the item or its file."""
        message = str(error) if isinstance(error, MediaError) else f"{name}: {str(error) or repr(error)}"
        why = {"error": type(error).__name__, "message": message}
        record = {"file_name": name, "status": FAILED, **why, "time": time.time(), **facts}
        self.journal.append(record)
        return record

    def close(self) -> None:
        self.journal.close()


class Finals:
    """The files that runs wrote besides caption files: a run replaces no other ones, unless `overwrite` is set.

    Each is recorded in the log before it is put in its place.
    """

    def __init__(self, folder: Path, overwrite: bool = False):
        self.folder, self._overwrite = folder, overwrite
        self.log = folder / STATE / LOG

    def claim(self, kinds: Collection[str], read: Iterable[Path] = (), report: Path | None = None) -> None:
        """OutputError if files of these kinds would replace a file that no run wrote, or one that this run reads.

        MediaError if a library that this run needs to write its files is not installed.
        """
        for kind in kinds:
            if kind in formats.LIBRARIES:
                need(formats.LIBRARIES[kind], f"--format {kind}")
        names = [FAILURES, *(formats.NAMES[kind] for kind in kinds if kind in formats.NAMES)]
        written = [*(self.folder / name for name in names), *([report] if report else [])]
        if "webdataset" in kinds:
            tars = sorted((self.folder / "webdataset").glob("*"))
            written += [path for path in tars if SHARD.fullmatch(f"webdataset/{path.name}")]
        inputs = {path.resolve() for path in read}
        if foreign := [str(path) for path in written if not self.free(path)]:
            raise OutputError(
                f"{', '.join(foreign)} would be replaced, but no run wrote it; move it away, choose another name, "
                "or use --on-existing overwrite"
            )
        if lost := [str(path) for path in written if path.resolve() in inputs]:
            raise OutputError(f"{', '.join(lost)} is read by this run and would be replaced; choose another name")

    def free(self, path: Path) -> bool:
        """Whether a file may be put there: nothing is there, or a run wrote it, or all files may be replaced."""
        return not os.path.lexists(path) or self._overwrite or self._name(path) in self.noted()

    def noted(self) -> set[str]:
        lines = [line for log in self.log.parent.glob("*.log") for line in log.read_bytes().splitlines()]
        return {str(line.get("file")) for line in map(parse, lines) if line is not None}

    def note(self, path: Path) -> None:
        """Record that a file is about to be put at `path`; only one run at a time calls this."""
        if (name := self._name(path)) not in self.noted():
            with contextlib.closing(Journal(self.log)) as log:
                log.append({"file": name})

    def drop_shards(self, written: Collection[Path]) -> None:
        """Remove tars that earlier runs wrote and this one did not, since there are fewer captions now."""
        for name in self.noted():
            if SHARD.fullmatch(name) and self.folder / name not in written:
                (self.folder / name).unlink(missing_ok=True)

    def _name(self, path: Path) -> str:
        """The name in the log: the path relative to the output folder, or the whole path outside of it."""
        place, folder = Path(os.path.abspath(path)), Path(os.path.abspath(self.folder))
        return (place.relative_to(folder) if place.is_relative_to(folder) else place).as_posix()


class Outputs:
    """The output folder in the planning process: locks it and reads all journals.

    Args:
        slots: prefix of this run's journal names; the run of a shard leaves the journals of other shards alone.
        fetch: downloads the journals of other shards into this folder, if it is the copy of a remote one.
    """

    def __init__(
        self, folder: Path, origin: str, slots: str = "", look_only: bool = False, overwrite: bool = False,
        fetch: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self.folder, self.origin, self.slots = folder, digest(os.fsencode(origin))[:16], slots
        self.state, self._fetch = folder / STATE, fetch
        self.finals = Finals(folder, overwrite)
        self._locks: list[int] = []
        self.ledger = Ledger([])
        try:
            if not look_only:
                self.state.mkdir(parents=True, exist_ok=True)
                self._lock()
            self.ledger = Ledger(sorted(self.state.glob("*.jsonl")))
        except (OSError, OutputError) as error:
            self.close()
            if isinstance(error, OutputError):
                raise
            raise OutputError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from error

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
        self._fetch()
        self.ledger.close()
        self.ledger = Ledger(sorted(self.state.glob("*.jsonl")))  # now with the workers' results
        self.finals.claim(kinds)
        written: list[Path] = []
        for kind in kinds:
            if kind == "txt" or not self.ledger.captioned():  # text files are written when the items are finished
                continue
            more: Record = {}
            if kind == "webdataset":
                more = {"sources": {item.name: item.source for item in items()}, "max_bytes": most}
            for path in formats.FORMATS[kind](self.ledger.all_captions(), self.folder, **more):
                self.finals.note(path)
                written.append(path)
            if kind == "webdataset":
                self.finals.drop_shards(written)
        failures, failed = self.folder / FAILURES, list(self.ledger.all_failures())
        names = {item.name for item in items()} if failed else set()  # of inputs that are still there
        standing = (one for one in failed if one["file_name"] in names or one.get("folder") != self.origin)
        if lines := b"".join(map(line_of, standing)):
            self.finals.note(failures)
            write_whole(failures, lines)
        else:
            failures.unlink(missing_ok=True)
        return written

    def close(self) -> None:
        self.ledger.close()
        for handle in self._locks:
            os.close(handle)
        self._locks.clear()

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
    """Write a caption file in one step; the message of the OSError says where the caption is recorded."""
    path = folder / sidecar
    try:
        write_whole(path, f"{text}\n".encode(), partial, durable=False)  # can be restored from the journal
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror or error}"
        raise OSError(f"{reason}; the caption itself is in {folder / STATE}") from error


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
