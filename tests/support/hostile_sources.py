"""Sources for decoder processes: one that holds its bytes, and some that attack whoever reads them. Light to import."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mmspec.media import MAX_BYTES, MediaError


@dataclass(frozen=True)
class Memory:
    """A source that holds its bytes."""

    data: bytes
    path: ClassVar[None] = None

    def read(self, max_bytes: int = MAX_BYTES) -> bytes:
        return self.data


def what_it_reads(item: Any) -> bytes | str:
    """What an item's source gives, or why it gives nothing."""
    try:
        return item.source.read()  # type: ignore[no-any-return]
    except MediaError as error:
        return str(error)


@dataclass(frozen=True)
class Attack:
    """A source that does something bad to the process that reads it."""

    deed: str
    path: ClassVar[None] = None

    def read(self, max_bytes: int = MAX_BYTES) -> bytes:
        return DEEDS[self.deed]()


def _swell() -> bytes:
    hoard = []
    while True:
        hoard.append(bytes(2**26))


def _spin() -> bytes:
    while True:
        pass


def _confess() -> bytes:
    heavy = {"torch", "numpy", "transformers", "av", "gradio", "pyarrow", "datasets"} & set(sys.modules)
    raise MediaError("modules", f"loaded: {sorted(heavy)}", "nothing")


DEEDS: dict[str, Callable[[], bytes]] = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV) or b"",
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL) or b"",
    "abort": lambda: os.abort(),
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(3),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP) or b"",
    "sleep": lambda: time.sleep(600) or b"",
    "spin": _spin,
    "swell": _swell,
    "raise": lambda: 1 // 0,  # type: ignore[dict-item]
    "recurse": lambda: (f := lambda: f())(),
    "no bytes": lambda: None,  # type: ignore[dict-item,return-value]
    "confess": _confess,
}


@dataclass(frozen=True)
class Unbuildable:
    """A source that cannot be unpickled."""

    path: ClassVar[None] = None

    def read(self, max_bytes: int = MAX_BYTES) -> bytes:
        return b""

    def __reduce__(self) -> tuple:
        return int, ("no number",)


def refuse_to_start(*_: object) -> None:
    """In place of a worker process's main function: one that ends before it has begun."""
    os._exit(7)
