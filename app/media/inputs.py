"""The inputs of a run: any mix of files, folders, globs, lists, tables, tars and data sets, read item by item."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmspec import media
from mmspec.app.media import hub, tables, tars
from mmspec.app.media.items import IMAGE, VIDEO_EXTENSIONS, Item, broken, file_item, kind_of, need
from mmspec.app.media.remote import Remote, is_address
from mmspec.app.media.tables import Columns
from mmspec.media import MediaError

KNOWN = (
    "images, videos, folders, globs (*.jpg), lists (.txt .lst), .jsonl .csv .tsv .parquet, webdataset .tar, "
    "hf:owner/name, s3:// gs:// hf:// folders and files"
)


class Place(Protocol):
    """One source of items."""

    @property
    def root(self) -> Path | None:
        """The folder that names of its items are relative to; None if there is none."""

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        """Its items. MediaError if it cannot be read at all, or no further; a bad item among others is `broken`."""


@dataclass(frozen=True)
class Files:
    """Single files named by hand or by a glob."""

    paths: tuple[Path, ...]
    root: Path

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        return (file_item(path, name_of) for path in self.paths)


@dataclass(frozen=True)
class Folder:
    """The images and videos of a folder by their extensions, subfolders last; hidden files and folders are skipped."""

    root: Path
    recursive: bool

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        errors: list[OSError] = []
        for folder, below, files in os.walk(self.root, onerror=errors.append):  # follows no links to folders
            below[:] = sorted(name for name in below if self.recursive and not name.startswith("."))
            for name in sorted(name for name in files if kind_of(name) and not name.startswith(".")):
                yield file_item(Path(folder, name), name_of)
        for error in errors:
            reason = f"cannot be listed ({error.strerror or error})"
            yield broken(name_of(Path(error.filename)), MediaError(error.filename, reason, "check its permissions"))


CONTAINERS: dict[str, Callable[[Path, Columns], Place]] = {  # by extension
    **dict.fromkeys(tables.LISTS | tables.LINES | tables.SHEETS, tables.TableRows),
    **dict.fromkeys(tables.PARQUETS, tables.Parquet),
    ".tar": tars.Tar,
}


class Inputs:
    """All inputs of a run; its items have unique names and always come in the same order."""

    def __init__(self, places: Sequence[Place]):
        self.places = places
        roots = [place.root for place in places if place.root is not None]
        self.root: Path | None = _common(roots) if roots else None
        self._above = os.path.join(os.path.abspath(self.root or ""), "")

    def items(self) -> Iterator[Item]:
        """All items; an item that is given twice comes once, and a different item with the same name fails."""
        seen: dict[bytes, bytes] = {}  # digests, because the names of a hundred million items are too long to keep
        for item in itertools.chain.from_iterable(map(self._items_of, self.places)):
            name, source = _digest(item.name), _digest(item.source.label)
            if name not in seen:
                seen[name] = source
                yield item
            elif seen[name] != source:
                reason, advice = f"has the name of another item before it, {item.name!r}", "rename one of them"
                own = next(one for n in itertools.count(2) if _digest(one := f"{item.name}#{n}") not in seen)
                seen[_digest(own)] = b""
                yield broken(own, MediaError(item.source.label, reason, f"{advice}, or caption them in two runs"))

    def _items_of(self, place: Place) -> Iterator[Item]:
        """The items of one place, and an item that fails in the place of those that cannot be read."""
        try:
            yield from place.items(self._name_of)
        except MediaError as error:
            yield broken(self._name_of(Path(error.path)), error)

    def subfolders(self) -> int:
        """The number of subfolders that are not read."""
        folders = [place.root for place in self.places if isinstance(place, Folder) and not place.recursive]
        return sum(path.is_dir() and not path.name.startswith(".") for root in folders for path in root.iterdir())

    def _name_of(self, path: Path) -> str:
        """Path relative to the root; the full path for files outside of it, which a list may name."""
        whole = os.path.abspath(path)
        below = whole.removeprefix(self._above) if whole.startswith(self._above) else os.path.splitdrive(whole)[1]
        return below.replace(os.sep, "/").lstrip("/")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def open_inputs(
    where: Sequence[str | Path], *, recursive: bool = False, column_image: str | None = None,
    column_text: str | None = None,
) -> Inputs:  # fmt: skip
    """Open the inputs with these names; MediaError if one of them has nothing to caption."""
    columns = Columns(column_image, column_text)
    several = sum(map(is_address, where)) > 1
    places: list[Place] = []
    for name in map(str, where):
        if is_address(name) and Path(name).suffix.lower() in CONTAINERS:
            why = "is a remote list, table or tar; these are read from local disks only"
            raise MediaError(name, why, "download it first")
        found = [Remote(name, recursive, several)] if is_address(name) else [*_places(name, recursive, columns)]
        _check(found)
        places += found
    if not places:
        raise MediaError("", "nothing to caption", f"name {KNOWN}")
    return Inputs(places)


def _check(places: Sequence[Place]) -> None:
    """Raise the MediaError of the first place if none can be used; a broken one among others fails later, alone."""
    troubles = []
    for place in places:
        try:
            next(place.items(str))
            return  # the others are opened later
        except StopIteration:
            known = f"known extensions are {' '.join(sorted(media.EXTENSIONS | VIDEO_EXTENSIONS))}"
            reason, advice = "no images or videos found", f"name subfolders, or caption --recursive; {known}"
            troubles.append(MediaError(getattr(place, "address", place.root or ""), reason, advice))
        except MediaError as error:
            troubles.append(error)
    raise troubles[0]


def images(where: str | Path) -> list[Path]:
    """The images of a folder and its subfolders, or the one image named; MediaError if there are none."""
    items = open_inputs([where], recursive=True).items()
    return [item.source.path for item in items if item.kind == IMAGE and item.source.path is not None]


def _places(name: str, recursive: bool, columns: Columns) -> Iterator[Place]:
    path = Path(name)
    if name.startswith("hf:"):
        yield hub.Dataset(name, columns, hub.SPLIT)
    elif name and os.path.lexists(path):  # an empty name, as of an unset variable, is no folder
        yield _place(path, recursive, columns)
    elif "{" in name or glob.has_magic(name):
        yield from _pattern(name, recursive, columns)
    else:
        raise MediaError(name or "''", "no such file or folder", f"give {KNOWN}")


def _place(path: Path, recursive: bool, columns: Columns) -> Place:
    if path.is_dir():
        return Folder(path, recursive)
    if path.suffix.lower() in CONTAINERS:
        return CONTAINERS[path.suffix.lower()](path, columns)
    if kind_of(path.name) is None:
        raise MediaError(path, f"is of no known kind ({path.suffix or 'no extension'})", f"give {KNOWN}")
    return Files((path,), path.parent)


def _pattern(name: str, recursive: bool, columns: Columns) -> Iterator[Place]:
    """The matches of a pattern with * ? [a-z] {0..9} {a,b}: media files, and tars or tables if it ends like those."""
    ending = Path(name).suffix.lower()
    paths: list[Path] = []
    for part in need("braceexpand", name).braceexpand(name) if "{" in name else [name]:
        matches = sorted(glob.glob(part, recursive=True), key=lambda match: Path(match).parts)
        if not matches:
            raise MediaError(part, "matches no file", f"check the pattern {name}" if part != name else f"give {KNOWN}")
        paths += map(Path, matches)
    files = tuple(path for path in paths if kind_of(path.name) and not path.is_dir())
    others = [path for path in paths if ending in CONTAINERS and path.suffix.lower() == ending]
    others += [path for path in paths if recursive and path.is_dir()]
    if not (files or others):
        raise MediaError(name, f"matches {len(paths)} files, but no image or video", f"give {KNOWN}")
    if files:  # named below the folder that all possible matches share
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part) and "{" not in part, Path(name).parts[:-1])
        yield Files(files, Path(*fixed))
    yield from (_place(path, recursive, columns) for path in others)


def _common(folders: Sequence[Path]) -> Path:
    """The deepest folder that contains all of these; a single one is returned as it was given."""
    return folders[0] if len({*folders}) == 1 else Path(os.path.commonpath([*map(os.path.abspath, folders)]))
