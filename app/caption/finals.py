"""Protects existing files: a run replaces only final files that are in its log, unless told to overwrite others."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from mmspec.app.caption import formats
from mmspec.app.caption.journal import Journal, lines_of, parse
from mmspec.app.media.items import need

FAILURES = "failed.jsonl"  # written by every run in which something failed
LOG = "finals.log"  # in the folder of the journals
SHARD = re.compile(r"webdataset/\d+\.tar")


class OutputError(Exception):
    """The output folder cannot be used."""


class Finals:
    """The final files that runs have written: each is recorded in `finals.log` before it is put in its place.

    Args:
        overwrite: whether files that no run wrote may be replaced.
        elsewhere: names of tars that exist only in the remote copy of the folder.
    """

    def __init__(self, folder: Path, state: Path, overwrite: bool = False, elsewhere: Collection[str] = ()):
        self.folder, self._log, self._overwrite, self._elsewhere = folder, state / LOG, overwrite, elsewhere
        self.reserved: set[str] = set()  # names in the folder that no caption file may have

    def claim(self, kinds: Collection[str], read: Iterable[Path], report: Path | None) -> None:
        """Called before any work. OutputError if this run would replace a file that no run wrote, or one that it reads.

        MediaError if a library that it needs to write its files is not installed.
        """
        for kind in kinds:
            for library in formats.LIBRARIES.get(kind, ()):
                need(library, f"--format {kind}")
        self.refuse_strangers(kinds)
        inputs = {path.resolve(): path for path in read}
        for path in inputs.values():
            if self._made_at(path, kinds):
                raise OutputError(f"{path} would be replaced by this run's outputs; move it, or choose another --out")
        if report is not None and (report.resolve() in inputs or self._made_at(report, kinds)):
            raise OutputError(f"--report {report} would replace a file that this run reads or writes; name another")
        if report is not None and not self.free(report):
            raise OutputError(
                f"--report {report} would replace a file that no run wrote; name another, or --on-existing overwrite"
            )
        self.reserved = {*map(self._name, [*inputs, *([report] if report else [])]), *_names(kinds)}

    def refuse_strangers(self, kinds: Collection[str]) -> None:
        """OutputError if files of these kinds would replace one that no run wrote."""
        if self._overwrite:
            return
        there = [name for name in _names(kinds) if os.path.lexists(self.folder / name)]
        if "webdataset" in kinds:
            shards = [f"webdataset/{path.name}" for path in sorted((self.folder / "webdataset").glob("*"))]
            there += sorted({name for name in (*shards, *self._elsewhere) if SHARD.fullmatch(name)})
        ours = noted(self._log)  # read last: the run of another shard records a file before it puts it there
        if foreign := [name for name in there if name not in ours]:
            raise OutputError(
                f"{', '.join(foreign)} in {self.folder} would be replaced, but no run wrote it; move it away, choose "
                "another --out, or use --on-existing overwrite"
            )

    def free(self, path: Path) -> bool:
        """Whether a file may be put there: the place is free, or holds a run's file, or all files may be replaced."""
        if not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0):
            return True
        mine = self._overwrite or (self._name(path) or str(path.resolve())) in noted(self._log)
        return mine and path.is_file() and not path.is_symlink()

    def note(self, path: Path) -> None:
        """Record that a file is about to be put at `path`; only one run at a time calls this."""
        inside = path.is_relative_to(self.folder)
        name = path.relative_to(self.folder).as_posix() if inside else self._name(path) or str(path.resolve())
        if name not in noted(self._log):
            with Journal(self._log) as log:
                log.append({"file": name})

    def drop_shards(self, written: Collection[Path]) -> None:
        """Remove tars that earlier runs wrote and this one did not, since there are fewer captions now."""
        for name in noted(self._log):
            if SHARD.fullmatch(name) and self.folder / name not in written:
                (self.folder / name).unlink(missing_ok=True)

    def _made_at(self, path: Path, kinds: Collection[str]) -> bool:
        """Whether a run that writes files of these kinds may put one at `path`."""
        name = self._name(path)
        return name in _names(kinds) or ("webdataset" in kinds and SHARD.fullmatch(name) is not None)

    def _name(self, path: Path) -> str:
        """Path relative to the output folder; empty for files outside of it."""
        place, folder = path.resolve(), self.folder.resolve()
        return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else ""


def noted(log: Path) -> set[str]:
    """The names recorded in such a log."""
    return {str(line.get("file")) for line in map(parse, lines_of(log)) if line is not None}


def _names(kinds: Iterable[str]) -> list[str]:
    """Files that a run may write or remove, except those of webdataset."""
    return [formats.NAMES[kind] for kind in kinds if kind in formats.NAMES] + [FAILURES]
