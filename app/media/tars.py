"""Webdataset tars: files with the same key are one sample; workers read a member by its byte offset."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from mmspec import media
from mmspec.app.media.items import Item, Source, kind_of
from mmspec.app.media.tables import Container, json_object, text_of
from mmspec.media import COPY_AGAIN, MediaError

LONGEST = 2**20  # bytes of a .txt or .json in a tar; longer ones are ignored
Member = tuple[str, str, tarfile.TarInfo]  # key, extension and the tar's entry
SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # key and extension, split as webdataset does


class Tar(Container):
    """The samples of one tar; the `.txt` of a sample is its caption, or the `.json` may hold it."""

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        name, empty = name_of(self.path), True
        try:
            with tarfile.open(self.path, "r:") as tar:
                for key, sample in groupby(_members(tar), itemgetter(0)):
                    for item in self._items_of(tar, f"{name}/{key}", list(sample)):
                        empty = False
                        yield item
        except (tarfile.TarError, OSError, EOFError) as error:
            reason = f"is not a whole, uncompressed tar ({error})"
            raise MediaError(self.path, reason, "copy, download or unpack it again") from error
        if empty:
            raise MediaError(self.path, "holds no images or videos", "check how it was made")

    def _items_of(self, tar: tarfile.TarFile, name: str, sample: list[Member]) -> Iterator[Item]:
        shown = [(extension, info) for _, extension, info in sample if kind_of(info.name)]
        if not shown:
            return
        texts = {extension: _text(tar, info) for _, extension, info in sample if extension in ("txt", "json")}
        parsed = json_object(texts.get("json", ""))
        facts = parsed if isinstance(parsed, dict) else {}  # invalid JSON does not make its picture fail
        caption = facts.get(self.columns.text) if self.columns.text else facts.get("caption", facts.get("text"))
        existing = text_of(texts["txt"] if "txt" in texts and not self.columns.text else caption)
        for extension, info in shown:
            own = name if len(shown) == 1 else f"{name}.{extension}"
            source = member_source(self.path, info.name, info.offset_data, info.size)
            yield Item(own, kind_of(info.name) or "", source, existing)


def member_source(tar: Path, member: str, offset: int, size: int) -> Source:
    """A member of an uncompressed tar, read by its offset without another pass over the tar."""
    label = f"{tar}: {member} at byte {offset}"
    return Source(label, partial(_read_member, tar, offset, size, label), within=tar)


def _read_member(tar: Path, offset: int, size: int, label: str, max_bytes: int = media.MAX_BYTES) -> bytes:
    media.check_bytes(size, label, max_bytes)
    try:
        with open(tar, "rb") as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise MediaError(tar, f"cannot be read ({error.strerror or error})", "check the disk") from error
    if len(data) < size:
        raise MediaError(label, "is cut off", COPY_AGAIN)
    return data


def _members(tar: tarfile.TarFile) -> Iterator[Member]:
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # else it keeps every member in memory
        parts = SAMPLE.fullmatch(info.name)
        if info.isreg() and not info.issparse() and parts:
            safe = "/".join(part for part in parts[1].split("/") if part not in ("", ".", ".."))
            yield safe, parts[2].lower(), info


def _text(tar: tarfile.TarFile, info: tarfile.TarInfo) -> str:
    if info.size > LONGEST:
        return ""
    tar.fileobj.seek(info.offset_data)  # type: ignore[union-attr]  # not extractfile: iteration goes on by offsets
    return tar.fileobj.read(info.size).decode("utf-8", "replace")  # type: ignore[union-attr]
