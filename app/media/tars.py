"""Webdataset tars: files of the same key are one sample; found by place, so that workers read only what they need."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from mmspec.app.media.items import Item, TarSource, broken, kind_of
from mmspec.app.media.tables import Table, json_object, tags_of, text_of
from mmspec.media import MediaError

EXTENSIONS = {".tar"}
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
LONGEST = 2**20  # bytes of a .txt or .json in a tar; a longer one is no caption
Member = tuple[str, str, tarfile.TarInfo]  # key and extension beside it
SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # key and extension, as webdataset splits them


@dataclass(frozen=True)
class Tar(Table):
    """The samples of one tar; a `.txt` beside an image is its caption, a `.json` may hold its caption and tags."""

    def check(self) -> None:
        try:
            tarfile.open(self.path, "r:").close()
        except (tarfile.TarError, OSError) as error:
            raise self._unreadable(error) from error

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        name, empty = name_of(self.path), True
        try:
            with tarfile.open(self.path, "r:") as tar:
                for key, sample in groupby(_members(tar), itemgetter(0)):
                    for item in self._items_of(tar, f"{name}/{key}", list(sample)):
                        empty = False
                        yield item
        except (tarfile.TarError, OSError, EOFError) as error:
            trouble = self._unreadable(error)
            yield broken(name, self.path, trouble.reason, trouble.what_to_do)
            return
        if empty:
            yield broken(name, self.path, "holds no images or videos", "check how it was made")

    def _items_of(self, tar: tarfile.TarFile, name: str, sample: list[Member]) -> Iterator[Item]:
        shown = [(extension, info) for _, extension, info in sample if kind_of(info.name)]
        if not shown:
            return
        texts = {extension: _text(tar, info) for _, extension, info in sample if extension in ("txt", "json")}
        held = json_object(texts.get("json", ""))
        facts = held if isinstance(held, dict) else {}  # the picture beside it is not to blame
        said = facts.get(self.columns.text) if self.columns.text else facts.get("caption", facts.get("text"))
        existing = text_of(texts["txt"] if "txt" in texts and not self.columns.text else said)
        tags = tags_of(facts.get(self.columns.tags or "tags"))
        for extension, info in shown:
            source = TarSource(self.path, info.name, info.offset_data, info.size)
            own = name if len(shown) == 1 else f"{name}.{extension}"
            yield Item(own, kind_of(info.name) or "", source, existing, tags)

    def _unreadable(self, error: Exception) -> MediaError:
        return MediaError(self.path, f"is not a whole, uncompressed tar ({error})", "copy, download or unpack it again")


def _members(tar: tarfile.TarFile) -> Iterator[Member]:
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # it remembers every member, which would be a lot
        parts = SAMPLE.fullmatch(info.name)
        if info.isreg() and not info.issparse() and parts:
            safe = "/".join(part for part in parts[1].split("/") if part not in ("", ".", ".."))
            yield safe, parts[2].lower(), info


def _text(tar: tarfile.TarFile, info: tarfile.TarInfo) -> str:
    if info.size > LONGEST:
        return ""
    tar.fileobj.seek(info.offset_data)  # type: ignore[union-attr]  # not extractfile: the walk goes on by offsets
    return tar.fileobj.read(info.size).decode("utf-8", "replace")  # type: ignore[union-attr]
