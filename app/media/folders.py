"""The images and videos of a folder, optionally with its subfolders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmspec import media
from mmspec.app.media.items import VIDEO_EXTENSIONS, Item, broken, file_item, kind_of
from mmspec.media import MediaError


@dataclass(frozen=True)
class Folder:
    """All files with an image or video extension in a folder, sorted by path; hidden files and folders are skipped."""

    root: Path
    recursive: bool

    def check(self) -> None:
        if next(self._walk(), None) is None:
            known = f"known extensions are {' '.join(sorted(media.EXTENSIONS | VIDEO_EXTENSIONS))}"
            advice = known if self.recursive else f"add --recursive for subfolders; {known}"
            raise MediaError(self.root, "no images or videos found", advice)

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        for one in self._walk():
            if isinstance(one, MediaError):
                yield broken(name_of(one.path), one.path, one.reason, one.what_to_do)
            else:
                yield file_item(one, name_of)

    def skipped(self) -> list[str]:
        """Names of subfolders that are not read."""
        return [] if self.recursive else [entry.name for entry in self._entries(self.root) if _is_folder(entry) is True]

    def left_out(self) -> Counter[str]:
        """Counts, by extension, of files whose names are not those of images or videos."""
        others: Counter[str] = Counter()
        for _ in self._walk(others):
            pass
        return others

    def _walk(self, others: Counter[str] | None = None) -> Iterator[Path | MediaError]:
        """Media files, and errors for folders or links that cannot be read.

        Files of other kinds are counted in `others` by their extensions.
        """
        stack = [iter(self._entries(self.root))]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
                continue
            is_folder = _is_folder(entry)
            if is_folder is True:
                if self.recursive and not entry.is_symlink():  # a link could lead to a cycle
                    try:
                        stack.append(iter(self._entries(Path(entry.path))))
                    except MediaError as error:
                        yield error
            elif kind_of(entry.name):
                yield Path(entry.path)
            elif is_folder is False:
                if others is not None:
                    others[os.path.splitext(entry.name)[1].lower()] += 1
            elif self.recursive:
                yield media.explained(Path(entry.path), is_folder)

    @staticmethod
    def _entries(folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(
                    (entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name
                )
        except OSError as error:
            raise MediaError(
                folder, f"cannot be listed ({error.strerror or error})", "check its permissions"
            ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool | OSError:
    """Whether an entry is a folder, or a link to one; or the error that prevents telling."""
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself, or through a folder that may not be entered
        return error
