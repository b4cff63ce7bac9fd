"""Remote files by address: s3://, gs://, hf:// and whatever else fsspec opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from fsspec.core import url_to_fs
from fsspec.utils import tokenize

from mmspec import media
from mmspec.app.media.items import IMAGE, Item, Source, kind_of
from mmspec.media import MediaError

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+(::[a-z][a-z0-9+.-]+)*://")  # a single letter is a drive
CHECK = "check the address, your credentials and the network"


def is_address(name: object) -> bool:
    """Whether this is a remote address, such as s3://bucket/photos."""
    return ADDRESS.match(str(name)) is not None


def filesystem(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it; MediaError if a library is missing, or it cannot connect."""
    try:
        return url_to_fs(address)  # type: ignore[no-any-return]
    except ImportError as error:
        raise MediaError(address, f"needs another library ({error})", "install it with pip") from error
    except Exception as error:  # each library has its own errors
        raise unreachable(address, error) from error


def unreachable(address: str, error: Exception) -> MediaError:
    """The error for an address that cannot be used."""
    if isinstance(error, FileNotFoundError):
        return MediaError(address, "is missing: no such file or folder", CHECK)
    return MediaError(address, f"cannot be reached ({type(error).__name__}: {error})", CHECK)


@dataclass(frozen=True)
class Remote:
    """The images and videos of a remote folder or pattern, in the order of their paths; or one remote file.

    Attributes:
        whole: name items by their full path instead of the path in the folder, for several folders at once.
    """

    address: str
    recursive: bool = False
    whole: bool = False
    root: ClassVar[None] = None

    def items(self, name_of: Callable[[Path], str]) -> Iterator[Item]:
        fs, where = filesystem(self.address)
        fixed = re.split(r"[*\[]", where)[0]
        above = f"{where.rstrip('/')}/" if fixed == where and where not in self._files else fixed.rpartition("/")[0]
        for path, facts in self._files.items():
            address, size, dated = fs.unstrip_protocol(path), facts.get("size"), tokenize(facts)
            parts = path.removeprefix("" if self.whole else above).split("/")
            name = "/".join(part for part in parts if part not in ("", ".", ".."))
            yield Item(name, kind_of(path) or IMAGE, Source(address, partial(_read, address, size), dated=dated))

    @cached_property
    def _files(self) -> dict[str, dict[str, Any]]:
        fs, path = filesystem(self.address)
        try:
            if fs.isdir(path):
                listed = fs.find(path, maxdepth=None if self.recursive else 1, detail=True)
            elif re.search(r"[*\[]", path):
                listed = fs.glob(path, detail=True)
            else:
                return {path: fs.info(path)}
        except Exception as error:
            raise unreachable(self.address, error) from error
        return {
            name: facts
            for name, facts in sorted(listed.items())
            if facts.get("type") != "directory" and kind_of(name) and "/." not in name.removeprefix(path)
        }


def _read(address: str, size: int | None, max_bytes: int = media.MAX_BYTES) -> bytes:
    """The bytes of a remote file, whose size is None if it is unknown."""
    if size is not None:
        media.check_bytes(size, address, max_bytes)
    fs, path = filesystem(address)
    try:
        with fs.open(path, "rb") as file:
            data: bytes = file.read(max_bytes + 1)
    except Exception as error:
        raise unreachable(address, error) from error
    media.check_bytes(len(data), address, max_bytes)
    return data
