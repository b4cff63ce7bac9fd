"""The final files of an output folder: what they are called, and which of those that lie there a run of ours made."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from mmspec.app.caption import formats
from mmspec.app.caption.journal import Journal, Ledger, Record, hold, parse
from mmspec.app.media.items import need

FAILURES = "failed.jsonl"  # made by every run in which anything failed
MERGED = formats.METADATA  # the lines of others in it are kept, so it may be anybody's
SHARD = re.compile(r"webdataset/\d+\.(tar|parquet)")
NOTING = 600.0  # seconds for which the runs of other shards may be writing notes


class OutputError(Exception):
    """The output folder cannot be used."""


class Finals:
    """What runs have put into a folder: a line in `finals.log`, with the file's sha256, before it gets its name.

    So a file is ours as long as it says what we wrote, wherever a kill came. A shard of tars tells by itself.
    """

    def __init__(self, folder: Path, state: Path):
        self.folder, self._log = folder, state / "finals.log"
        self.reserved: set[str] = set()  # names in the folder that no caption file may have

    def claim(
        self, kinds: Collection[str], names: Iterable[str], read: Iterable[Path], report: Path | None, ledger: Ledger
    ) -> None:
        """Before any work: OutputError if this run would replace a file of others, or one that it reads.

        MediaError if a library that it needs for its files is not installed.

        Args:
            names: of the items.
            report: one more file that will be written.
        """
        for kind in kinds:
            for library in formats.LIBRARIES.get(kind, ()):
                need(library, f"--format {kind}")
        self.refuse_strangers(kinds, ledger, names)
        read = {path.resolve(): path for path in read}
        for path in read.values():
            if self._made_at(path, kinds):
                raise OutputError(f"{path} would be replaced by what this run makes; move it, or choose another --out")
        if report is not None and (report.resolve() in read or self._made_at(report, kinds)):
            raise OutputError(f"--report {report} would replace a file that this run reads or makes; name another")
        said = [*read.values(), *([report] if report is not None else [])]
        self.reserved = {*map(self._name, said), *_names(kinds)}

    def refuse_strangers(self, kinds: Collection[str], ledger: Ledger, more: Iterable[str] = ()) -> None:
        """OutputError if files of these kinds would replace one that no run of ours made, or that was changed since.

        The files are those of the captions in the ledger and of items of `more` names.
        """
        left = {MERGED}
        if "pairs" in kinds:  # of the two lists it makes one
            listed = formats.list_of(itertools.chain(ledger.captions, more))
            left |= {formats.VIDEOS, formats.IMAGES} - {listed}
        found = [_line(self.folder / name) for name in _names(kinds) if name not in left]
        noted = self._noted()  # read last: what another shard's run puts there meanwhile, it notes first
        strange = [str(line["file"]) for line in found if line["sha256"] is not None and line not in noted]
        if "webdataset" in kinds:
            strange += formats.strange_shards(self.folder)
        if strange:
            raise OutputError(
                f"{', '.join(strange)} in {self.folder} would be replaced, but no run made it, or somebody changed it "
                "since; move it away, or choose another --out"
            )

    def note(self, path: Path, partial: Path) -> None:
        """Write down what is about to be put at `path`."""
        line = _line(partial) | {"file": path.name}
        with self._alone():
            if line not in self._noted():
                with Journal(self._log) as log:
                    log.append(line)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the runs of other shards from the notes."""
        with open(self._log.with_suffix(".lock"), "ab") as lock:
            if not hold(lock.fileno(), patience=NOTING):
                raise OutputError(f"another run still writes notes in {self.folder}; run the command again")
            yield

    def _made_at(self, path: Path, kinds: Collection[str]) -> bool:
        """Whether a run that makes files of these kinds may put one there."""
        name = self._name(path)
        return name in _names(kinds) or ("webdataset" in kinds and SHARD.fullmatch(name) is not None)

    def _name(self, path: Path) -> str:
        """Path in the output folder, as caption files have it; empty for what lies elsewhere."""
        place, folder = path.resolve(), self.folder.resolve()
        return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else ""

    def _noted(self) -> list[Record]:
        return [line for line in map(parse, lines_of(self._log)) if line is not None]


def _names(kinds: Iterable[str]) -> list[str]:
    """Files that a run may make or remove, but for those of webdataset."""
    return [name for kind in kinds for name in formats.NAMES.get(kind, ())] + [FAILURES]


def _line(path: Path) -> Record:
    """Name and sha256 of a file: None where nothing is, empty for what cannot be read as one."""
    sha256 = None
    with contextlib.suppress(OSError):
        if path.is_file():
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is None and os.path.lexists(path):
        sha256 = ""
    return {"file": path.name, "sha256": sha256}


def lines_of(path: Path) -> Iterator[bytes]:
    """Of a file, which need not be there."""
    if path.is_file():
        with open(path, "rb") as file:
            yield from file
