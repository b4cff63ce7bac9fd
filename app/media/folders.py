"""The images and videos of a folder, optionally with its subfolders; and single files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mmspec import media
from mmspec.app.media.items import Item, broken, file_item, kind_of
from mmspec.media import MediaError


@dataclass(frozen=True)
class Files:
    """Single files named by hand or by a glob."""

    paths: tuple[Path, ...]
    root: Path

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        return (file_item(path, name_of) for path in self.paths)


@dataclass(frozen=True)
class Folder:
    """All files with an image or video extension in a folder, sorted by path; hidden files and folders are skipped.

    Attributes:
        others: counts, by extension, of files that are no images or videos; filled while the items are listed.
        skipped: names of subfolders that are not read; filled while the items are listed.
    """

    root: Path
    recursive: bool
    others: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        self.others.clear()
        self.skipped.clear()
        stack = [self._entries(self.root)]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
                continue
            path = Path(entry.path)
            try:
                if not entry.is_dir():
                    if kind_of(entry.name):
                        yield file_item(path, name_of)
                    else:
                        self.others[path.suffix.lower()] += 1
                elif not self.recursive:
                    self.skipped.append(entry.name)
                elif not entry.is_symlink():  # a link could lead to a cycle
                    stack.append(self._entries(path))
            except OSError as error:  # a link to itself, or through a folder that may not be entered
                if self.recursive or kind_of(entry.name):
                    yield broken(name_of(path), media.explained(path, error))
            except MediaError as error:
                yield broken(name_of(path), error)

    @staticmethod
    def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                shown = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            reason = f"cannot be listed ({error.strerror or error})"
            raise MediaError(folder, reason, "check its permissions") from error
        return iter(sorted(shown, key=lambda entry: entry.name))
