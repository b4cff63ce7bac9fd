"""The files that a run makes: none is replaced whose name is not in our notes, unless that is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from mmspec.app.caption import formats
from mmspec.app.caption.journal import Journal, lines_of, parse
from mmspec.app.media.items import need

FAILURES = "failed.jsonl"  # made by every run in which anything failed
LOG = "finals.log"  # among the journals
SHARD = re.compile(r"webdataset/\d+\.tar")


class OutputError(Exception):
    """The output folder cannot be used."""


class Finals:
    """Names of what runs have made, in a folder and for it: a line in `finals.log` before a file gets its name.

    Args:
        overwrite: whether files of others may be replaced.
        elsewhere: tars that are where the folder is put, and not in it.
    """

    def __init__(self, folder: Path, state: Path, overwrite: bool = False, elsewhere: Collection[str] = ()):
        self.folder, self._log, self._overwrite, self._elsewhere = folder, state / LOG, overwrite, elsewhere
        self.reserved: set[str] = set()  # names in the folder that no caption file may have

    def claim(self, kinds: Collection[str], read: Iterable[Path], report: Path | None) -> None:
        """Before any work: OutputError if this run would replace a file of others, or one that it reads.

        MediaError if a library that it needs for its files is not installed.
        """
        for kind in kinds:
            for library in formats.LIBRARIES.get(kind, ()):
                need(library, f"--format {kind}")
        self.refuse_strangers(kinds)
        said = {path.resolve(): path for path in read}
        for path in said.values():
            if self._made_at(path, kinds):
                raise OutputError(f"{path} would be replaced by what this run makes; move it, or choose another --out")
        if report is not None and (report.resolve() in said or self._made_at(report, kinds)):
            raise OutputError(f"--report {report} would replace a file that this run reads or makes; name another")
        if report is not None and not self.free(report):
            raise OutputError(
                f"--report {report} would replace a file that no run made; name another, or say --on-existing overwrite"
            )
        self.reserved = {*map(self._name, [*said, *([report] if report else [])]), *_names(kinds)}

    def refuse_strangers(self, kinds: Collection[str]) -> None:
        """OutputError if files of these kinds would replace one that no run of ours made."""
        if self._overwrite:
            return
        there = [name for name in _names(kinds) if os.path.lexists(self.folder / name)]
        if "webdataset" in kinds:
            shards = [f"webdataset/{path.name}" for path in sorted((self.folder / "webdataset").glob("*"))]
            there += sorted({name for name in (*shards, *self._elsewhere) if SHARD.fullmatch(name)})
        ours = noted(self._log)  # read last: what another shard's run puts there meanwhile, it notes first
        if strange := [name for name in there if name not in ours]:
            raise OutputError(
                f"{', '.join(strange)} in {self.folder} would be replaced, but no run made it; move it away, choose "
                "another --out, or say --on-existing overwrite"
            )

    def free(self, path: Path) -> bool:
        """Whether a file may be put there: nothing is there, or what a run made, or all may be replaced."""
        if not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0):
            return True
        mine = self._overwrite or (self._name(path) or str(path.resolve())) in noted(self._log)
        return mine and path.is_file() and not path.is_symlink()

    def note(self, path: Path) -> None:
        """Write down what is about to be put at `path`; one run at a time does."""
        inside = path.is_relative_to(self.folder)
        name = path.relative_to(self.folder).as_posix() if inside else self._name(path) or str(path.resolve())
        if name not in noted(self._log):
            with Journal(self._log) as log:
                log.append({"file": name})

    def drop_shards(self, made: Collection[Path]) -> None:
        """Remove tars of a time when there were more captions, and no others."""
        for name in noted(self._log):
            if SHARD.fullmatch(name) and self.folder / name not in made:
                (self.folder / name).unlink(missing_ok=True)

    def _made_at(self, path: Path, kinds: Collection[str]) -> bool:
        """Whether a run that makes files of these kinds may put one there."""
        name = self._name(path)
        return name in _names(kinds) or ("webdataset" in kinds and SHARD.fullmatch(name) is not None)

    def _name(self, path: Path) -> str:
        """Path in the output folder, as caption files have it; empty for what lies elsewhere."""
        place, folder = path.resolve(), self.folder.resolve()
        return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else ""


def noted(log: Path) -> set[str]:
    """The names that runs have noted in such a log."""
    return {str(line.get("file")) for line in map(parse, lines_of(log)) if line is not None}


def _names(kinds: Iterable[str]) -> list[str]:
    """Files that a run may make or remove, but for those of webdataset."""
    return [formats.NAMES[kind] for kind in kinds if kind in formats.NAMES] + [FAILURES]
