"""What a captioning run leaves in its output folder, and what an earlier run or another hand already left there."""

from __future__ import annotations

import errno
import itertools
import os
import posixpath
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mmspec.app.caption import formats
from mmspec.app.caption.finals import FAILURES, MERGED, Finals, OutputError, lines_of
from mmspec.app.caption.journal import FAILED, Journal, Ledger, Record, digest, hold, line_of, parse, write_whole
from mmspec.app.media.items import Item

STATE = ".mmspec"  # folder in the output folder: journals, locks, the resolved options
LONGEST = 2**20  # bytes of a caption file that are looked at; a longer one is not ours
FINISHING = 600.0  # seconds for which another shard's run may be making the final files
PATIENCE = 60.0  # seconds for which the last workers of a killed run may still be writing


class UnwritableTextError(Exception):
    """A caption is in the journal, but its caption file cannot be written."""


class Sidecars:
    """Caption file per item: `x.txt`, or `x.jpg.txt` where that could mean two of them. Case does not count.

    Every name has to be added before the first is asked for.
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
        """Path in the output folder. OutputError if the name leads out of it."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise OutputError(f"the name {name!r} leads out of the output folder; rename it")
        here = _stem(name).casefold()
        alone = self._stems[here] == 1 and (here == name.casefold() or here not in self._names)
        return (_stem(name) if alone else name) + self.extension

    def possible(self, name: str) -> set[str]:
        """What its caption file may have been called at other times."""
        return {_stem(name) + self.extension, name + self.extension}

    def free(self, sidecar: str) -> bool:
        """Whether no item that was added has this caption file."""
        stem = sidecar.removesuffix(self.extension).casefold()
        return stem not in self._names and self._stems[stem] != 1


class Writer:
    """Where one worker puts its answers: its own journal, then the caption file. The journal is the truth."""

    def __init__(self, folder: Path, slot: str):
        self.folder = folder
        self.journal = Journal(folder / STATE / f"{slot}.jsonl")
        self._partial = folder / STATE / f"{slot}.partial"

    def write(self, name: str, text: str, sidecar: str | None, stale: str | None, facts: Record) -> None:
        """Record one caption; `stale` is the caption file of an earlier time that is to go."""
        self.journal.append({"file_name": name, "text": text, "sidecar": sidecar, "time": time.time(), **facts})
        if stale is not None:
            (self.folder / stale).unlink(missing_ok=True)
        if sidecar is not None:
            write_text(self.folder, sidecar, text, self._partial)

    def fail(self, name: str, error: Exception, facts: Record) -> None:
        """Record that an item got no caption, and why."""
        said = {"error": type(error).__name__, "message": str(error)}
        self.journal.append({"file_name": name, "status": FAILED, **said, "time": time.time(), **facts})

    def close(self) -> None:
        self.journal.close()


class Outputs:
    """The output folder as the planning process sees it: locked, and with all journals read.

    `slots` is the beginning of the names of this run's journals; a run of a shard leaves those of other shards alone.
    """

    def __init__(self, folder: Path, origin: str, slots: str = "", look_only: bool = False):
        self.folder, self.origin, self.slots = folder, digest(os.fsencode(origin))[:16], slots
        self.state, self.look_only = folder / STATE, look_only
        self.finals = Finals(folder, self.state)
        self._locks: list[int] = []
        self.foreign: dict[str, str] = {}  # name: caption by somebody else
        try:
            if not look_only:
                self.state.mkdir(parents=True, exist_ok=True)
                self._lock()
            self.ledger = Ledger(self._journals())
            self._read_metadata()
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise OutputError(f"cannot write to {folder}: {reason}; choose another --out") from error
        except OutputError:
            self.close()
            raise

    def reload(self) -> None:
        """Read the journals again, with what the workers have written since."""
        self.ledger.close()
        self.ledger = Ledger(self._journals())
        self._read_metadata()

    def existing(self, name: str, sidecar: str | None) -> str | None:
        """A caption in the output folder that is not ours, or one of ours that was edited since."""
        if name in self.foreign:
            return self.foreign[name]
        text = self.text_of(sidecar) if sidecar else None
        return text if text and text not in self.ledger.texts(name) else None

    def recall(self, asked: Iterable[tuple[str, str]]) -> None:
        """Let captions count again that items (by name) had by settings (by their `ask`) before they got others."""
        with Journal(self.state / f"{self.slots}recalled.jsonl") as journal:
            rest = iter(asked)
            while part := list(itertools.islice(rest, formats.CHUNK)):
                journal.append(*(record for name, ask in part if (record := self._recalled(name, ask))))
        self.reload()

    def _recalled(self, name: str, ask: str) -> Record | None:
        now = self.ledger.get(name) or {}
        record = self.ledger.earlier(name, ask, now.get("content"))
        place = {fact: now[fact] for fact in ("stamp", "folder", "path") if fact in now}
        return None if record is None else record | place | {"time": time.time()}

    def restore(self, record: Record, sidecar: str, stale: str | None, force: bool) -> bool:
        """Make the caption file of a recorded caption if it is missing, empty or moved; true if it was made."""
        text, there = str(record["text"]), self.text_of(sidecar)
        if stale is not None:
            (self.folder / stale).unlink(missing_ok=True)
        if there == text.strip() or (there and not force and there not in self.ledger.texts(record["file_name"])):
            return False
        write_text(self.folder, sidecar, text, self.state / f"{self.slots}restore.partial")
        return True

    def stale(self, record: Record, sidecar: str, sidecars: Sidecars) -> str | None:
        """The `x.txt` of a time when no `x.png` stood beside `x.jpg`, unless somebody edited it."""
        before = record.get("sidecar")
        own = sidecars.possible(str(record["file_name"]))
        if before == sidecar or before not in own or not sidecars.free(before):
            return None
        return before if self.text_of(before) == str(record["text"]).strip() else None

    def text_of(self, sidecar: str) -> str | None:
        """What a caption file says; None if it is missing, or a folder, pipe or device has its name."""
        path = self.folder / sidecar
        try:
            if not path.is_file():
                return None
            with open(path, "rb") as file:
                return file.read(LONGEST).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def finish(
        self, kinds: Collection[str], replace: bool, items: Callable[[], Iterable[Item]], most: int
    ) -> list[Path]:
        """Make the final files of all journals, each in one step; what was made.

        Args:
            items: of the run; asked for only where they are needed.
            most: bytes of an item, for webdataset.
        """
        if not self._alone("finish.lock", FINISHING):
            raise OutputError(f"another run is still finishing {self.folder}; run the command again")
        self.reload()
        self.finals.refuse_strangers(kinds, self.ledger)
        if replace:  # captions by another hand, with ours
            self.foreign = {name: text for name, text in self.foreign.items() if name not in self.ledger.captions}
        made: list[Path] = []
        for kind in kinds:
            made += self._make(kind, items, most)
        failures = self.folder / FAILURES
        lines = [line_of(record) for record in self.standing_failures(items)]
        if lines:
            with formats.replacing(failures, self.finals.note) as file:
                file.writelines(lines)
        else:
            failures.unlink(missing_ok=True)
        return made

    def standing_failures(self, items: Callable[[], Iterable[Item]]) -> Iterator[Record]:
        """Failures that nothing has made good, without those of files and rows that are there no more."""
        named: set[str] | None = None
        for record in self.ledger.all_failures():
            path = record.get("path")
            there = os.path.lexists(str(path)) if path is not None else record.get("folder") != self.origin
            if not there and named is None:
                named = {item.name for item in items()}
            if there or record["file_name"] in (named or ()):
                yield record

    def close(self) -> None:
        """Let go of the folder."""
        if hasattr(self, "ledger"):
            self.ledger.close()
        for handle in self._locks:
            os.close(handle)
        self._locks.clear()

    def _make(self, kind: str, items: Callable[[], Iterable[Item]], most: int) -> list[Path]:
        if kind == "txt":
            return []  # written as the items were finished
        captions = self.ledger.all_captions()
        if kind == "webdataset":
            sources = {item.name: item.source for item in items()}
            return formats.webdataset(captions, self.folder, sources, max_bytes=most)
        if kind != "metadata":
            return formats.FORMATS[kind](captions, self.folder, note=self.finals.note)
        ours = (record for record in captions if record["file_name"] not in self.foreign)
        return formats.metadata(itertools.chain(self._nameless, self._strangers(), ours), self.folder)

    def _strangers(self) -> Iterator[Record]:
        return (record for name, record in self._lines.items() if name in self.foreign)

    def _read_metadata(self) -> None:
        """Sort the lines of metadata.jsonl: our own, and those of somebody else."""
        self.foreign = {}
        self._nameless: list[Record] = []
        self._lines: dict[str, Record] = {}
        path = self.folder / MERGED
        if path.is_symlink():  # it could lead to any file of the user's
            raise OSError(errno.EINVAL, f"{path.name} there is a link or no file at all")
        for line in lines_of(path):
            record = parse(line)
            if record is None:
                continue
            name, text = record.get("file_name"), str(record.get("text")).strip()
            if name is None:
                self._nameless.append(record)
            elif text not in self.ledger.texts(str(name)):
                self.foreign[str(name)], self._lines[str(name)] = text, record

    def _journals(self) -> list[Path]:
        return sorted(self.state.glob("*.jsonl")) if self.state.is_dir() else []

    def _lock(self) -> None:
        """Hold the folder until the process ends, however it ends; wait for the last workers of a killed run."""
        whole = not self.slots
        taken = self._alone("run.lock", shared=not whole) and (whole or self._alone(f"{self.slots}.lock"))
        if not taken:
            raise OutputError(f"another mmspec caption writes to {self.folder}; wait for it or choose another --out")
        for path in self.state.glob(f"{self.slots}*.jsonl"):
            with open(path, "rb") as file:
                if not hold(file.fileno(), patience=PATIENCE):
                    raise OutputError(f"a worker of an earlier run still writes {path}; stop it, or wait for it")
        for path in self.state.glob(f"{self.slots}*.partial"):  # a worker of this run may have nothing to write there
            path.unlink(missing_ok=True)

    def _alone(self, name: str, patience: float = 0, shared: bool = False) -> bool:
        handle = os.open(self.state / name, os.O_RDWR | os.O_CREAT, 0o644)
        self._locks.append(handle)
        return hold(handle, shared, patience)


def write_text(folder: Path, sidecar: str, text: str, partial: Path) -> None:
    """A caption file, in one step; UnwritableTextError says where the caption is all the same."""
    path = folder / sidecar
    try:
        write_whole(path, f"{text}\n".encode(), partial, durable=False)  # the journal makes it again
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror or error}"
        raise UnwritableTextError(f"{reason}; the caption itself is in {folder / STATE}") from error


def combined(existing: str | None, text: str, mode: str) -> str:
    """The caption where one is there already, for --on-existing append and prepend."""
    if not existing or mode not in ("append", "prepend"):
        return text
    return f"{existing} {text}" if mode == "append" else f"{text} {existing}"


def facts_of(**facts: Any) -> Record:
    """Facts without those that say nothing."""
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
