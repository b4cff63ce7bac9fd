"""Progress bars: live in a terminal, and in a log a line of their own every half minute."""

from __future__ import annotations

import sys
from typing import Any, TextIO

EVERY = 30.0  # seconds between two lines in a log


class Log:
    """A stream in which each state of a bar is a line; whatever else is printed leaves it alone."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        if text := text.strip():
            self.stream.write(f"{text}\n")

    def flush(self) -> None:
        self.stream.flush()


def bar(wanted: bool = True) -> dict[str, Any]:
    """tqdm's options for a bar on stderr."""
    if sys.stderr.isatty():
        return {"disable": not wanted, "dynamic_ncols": True}
    return {"disable": not wanted, "file": Log(sys.stderr), "mininterval": EVERY, "maxinterval": EVERY}
