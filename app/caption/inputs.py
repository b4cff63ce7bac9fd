"""What a run captions: files, folders, globs, lists, tables, tars and data sets, mixed as they come, item by item."""

from __future__ import annotations

import glob
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from mmspec.app.caption import hub, media, tables, tars
from mmspec.app.caption.items import HEAD, IMAGE, VIDEO_EXTENSIONS, Item, file_item, kind_of, need, sniff
from mmspec.app.caption.media import MediaError
from mmspec.app.caption.tables import Columns

KNOWN = (
    "images, videos, folders, globs (*.jpg), lists (.txt .lst), .jsonl .csv .tsv .parquet, webdataset .tar, "
    "hf:owner/name"
)
SAVED_DATASET = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves in a folder


class Place(Protocol):
    """One source of items."""

    @property
    def root(self) -> Path | None:
        """The folder that it is called after; None where there is none."""

    @property
    def count(self) -> int | None:
        """How many items it has, where that can be told without reading all of it."""

    def check(self) -> None:
        """MediaError if it cannot be used at all."""

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]: ...


@dataclass(frozen=True)
class Files:
    """Single files named by hand or by a glob."""

    paths: tuple[Path, ...]
    root: Path

    @property
    def count(self) -> int:
        return len(self.paths)

    def check(self) -> None: ...

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        return (file_item(path, name_of) for path in self.paths)


@dataclass(frozen=True)
class Folder:
    """All images and videos of a folder by their extensions, hidden ones left out, in the order of their paths."""

    root: Path
    recursive: bool

    @cached_property
    def count(self) -> int:
        return sum(1 for _ in self._walk())

    def check(self) -> None:
        """MediaError if the folder cannot be listed or has nothing to caption."""
        if next(self._walk(), None) is None:
            known = f"known extensions are {' '.join(sorted(media.EXTENSIONS | VIDEO_EXTENSIONS))}"
            advice = known if self.recursive else f"add --recursive for subfolders; {known}"
            raise MediaError(self.root, "no images or videos found", advice)

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        return (file_item(path, name_of) for path in self._walk())

    def _walk(self) -> Iterator[Path]:
        stack = [iter(self._entries(self.root))]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif entry.is_dir():
                if self.recursive and not entry.is_symlink():  # a link could lead round in a circle
                    stack.append(iter(self._entries(Path(entry.path))))
            elif kind_of(entry.name):
                yield Path(entry.path)

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return sorted(
                    (entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name
                )
        except OSError as error:
            trouble = MediaError(folder, f"cannot be listed ({error.strerror or error})", "check its permissions")
            if folder == self.root:
                raise trouble from error
            warnings.warn(f"left out: {trouble}", stacklevel=2)
            return []


class Inputs:
    """Everything that a run was given; its items come one by one, with unique names and always in the same order."""

    def __init__(self, places: Sequence[Place]):
        self.places = places
        roots = [place.root for place in places if place.root is not None]
        self.root: Path | None = _common(roots) if roots else None

    @cached_property
    def count(self) -> int | None:
        """How many items there are (a thing named twice counts twice); None if only reading them all would tell."""
        counts = [place.count for place in self.places]
        return None if None in counts else sum(filter(None, counts))

    def items(self) -> Iterator[Item]:
        """All items, a thing that was named twice only once; MediaError where two things have one name."""
        seen: dict[int, int] = {}  # hashes, because the names of a hundred million items are too long to keep
        count = 0
        for item in self._found():
            name, thing = hash(item.name), hash(str(item.source))
            if seen.setdefault(name, thing) != thing:
                self._refuse_clash(item)
            elif len(seen) > count:
                count = len(seen)
                yield item

    def neighbours(self, names: Iterable[str]) -> set[str]:
        """Names of images and videos that lie beside those named, captioned or not: they decide how a `.txt` is called.

        Only folders on this machine have such neighbours.
        """
        if self.root is None:
            return set()
        folders = {name.rpartition("/")[0] for name in names}
        beside = set()
        for folder in folders:
            try:
                listed = os.listdir(self.root / folder)
            except OSError:  # a tar, a table, a folder that has gone
                continue
            beside |= {f"{folder}/{name}".lstrip("/") for name in listed if kind_of(name) and not name.startswith(".")}
        return beside

    def _found(self) -> Iterator[Item]:
        for place in self.places:
            yield from place.items(self._name_of)

    def _name_of(self, path: Path) -> str:
        """Path below the root; a file that a list names elsewhere goes by its whole path."""
        whole = os.path.abspath(path)
        below = whole.removeprefix(self._above) if whole.startswith(self._above) else os.path.splitdrive(whole)[1]
        return below.replace(os.sep, "/").lstrip("/")

    @cached_property
    def _above(self) -> str:
        return os.path.join(os.path.abspath(self.root or ""), "")

    def _refuse_clash(self, item: Item) -> None:
        for other in self._found():
            if other.name == item.name and str(other.source) != str(item.source):
                reason = f"two items are called so: {other.source} and {item.source}"
                raise MediaError(item.name, reason, "rename one of them, or caption them in two runs")


def open_inputs(
    where: Sequence[str | Path],
    *,
    recursive: bool = False,
    column_image: str | None = None,
    column_text: str | None = None,
    column_tags: str | None = None,
    split: str | None = None,
) -> Inputs:
    """What these names stand for; MediaError if one of them stands for nothing that can be captioned."""
    columns = Columns(column_image, column_text, column_tags)
    places: list[Place] = []
    for name in map(str, where):
        found = list(_places(name, recursive, columns, split))
        found[0].check()  # of many shards, the others are opened when it is their turn
        places += found
    if not places:
        raise MediaError("", "nothing to caption", f"name {KNOWN}")
    return Inputs(places)


def images(where: str | Path) -> list[Path]:
    """The images of a folder and of those in it, or the one image named; MediaError where there are none."""
    found = open_inputs([where], recursive=True).items()
    return [item.source.path for item in found if item.kind == IMAGE and item.source.path is not None]


def _places(name: str, recursive: bool, columns: Columns, split: str | None) -> Iterator[Place]:
    path = Path(name)
    if name.startswith("hf:"):
        yield hub.Dataset(name, columns, split)
    elif os.path.lexists(path):
        yield _place(path, recursive, columns, split)
    elif "{" in name or glob.has_magic(name):
        yield from _pattern(name, recursive, columns, split)
    else:
        raise MediaError(path, "no such file or folder", f"give {KNOWN}")


def _place(path: Path, recursive: bool, columns: Columns, split: str | None) -> Place:
    suffix = path.suffix.lower()
    if path.is_dir():
        saved = any((path / name).is_file() for name in SAVED_DATASET)
        return hub.Dataset(str(path), columns, split) if saved else Folder(path, recursive)
    if suffix in tars.EXTENSIONS:
        return tars.Tar(path, columns)
    if path.name.lower().endswith(tars.PACKED):
        raise MediaError(path, "is a compressed tar, in which nothing can be found by place", "unpack it to a .tar")
    if suffix in tables.PARQUETS:
        return tables.Parquet(path, columns)
    if suffix in tables.EXTENSIONS:
        return tables.Rows(path, columns)
    if not kind_of(path.name) and not _begins_like_media(path):
        raise MediaError(path, f"is of no known kind ({path.suffix or 'no extension'})", f"give {KNOWN}")
    return Files((path,), path.parent)


def _pattern(name: str, recursive: bool, columns: Columns, split: str | None) -> Iterator[Place]:
    """What a pattern with * ? [a-z] {0..9} {a,b} matches: media files, and tars and tables if it ends like those."""
    ending = Path(name).suffix.lower()
    tabular = tars.EXTENSIONS | tables.EXTENSIONS
    paths: list[Path] = []
    for part in need("braceexpand", name).braceexpand(name) if "{" in name else [name]:
        matches = sorted(glob.glob(part, recursive=True), key=lambda match: Path(match).parts)
        if not matches:
            raise MediaError(part, "matches no file", f"check the pattern {name}" if part != name else f"give {KNOWN}")
        paths += map(Path, matches)
    files = tuple(path for path in paths if kind_of(path.name) and not path.is_dir())
    others = [path for path in paths if ending in tabular and path.suffix.lower() == ending]
    folders = [path for path in paths if recursive and path.is_dir()]
    if not (files or others or folders):
        raise MediaError(name, f"matches {len(paths)} files, but no image or video", f"give {KNOWN}")
    if files:
        yield Files(files, _fixed_part(name))
    yield from (_place(path, recursive, columns, split) for path in others + folders)


def _fixed_part(pattern: str) -> Path:
    """The folder that all matches of a pattern share, whatever they are."""
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part) and "{" not in part, Path(pattern).parts[:-1])
    return Path(*fixed)


def _common(folders: Sequence[Path]) -> Path:
    """The deepest folder that holds all of these, as it was written if there is only one."""
    if len(set(folders)) == 1:
        return folders[0]
    try:
        return Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))
    except ValueError:  # on several drives of Windows
        return Path(os.path.abspath(folders[0]).partition(os.sep)[0] + os.sep)


def _begins_like_media(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return sniff(file.read(HEAD)) is not None
    except OSError:
        return True  # reading it as an item will say what is wrong
