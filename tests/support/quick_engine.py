"""An engine for `--engine quick_engine:load`: it answers from the pixels, after --max-new-tokens milliseconds."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class AcceleratorError(RuntimeError):
    """Called like torch's, without its import."""


@dataclass
class Answer:
    ticket: Any
    text: str
    tokens: int
    seconds: float
    error: Exception | None = None
    finish: str = "stop"
    further: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


class Quick:
    """An engine, and as a flow one answer a step; a model called `broken` fails on everything,
    `lost` after its third answer, and `deadly:NAME` takes the process with it at that item. In each process,
    `held:FILE` gives as many answers as the file says, while there is one. `lost:DEVICE` is lost there only,
    `unloadable:DEVICE` cannot be loaded there, `stillborn` ends its process while it is loaded; `cut` says that every
    answer was cut off.
    """

    model = processor = drafter = None
    compilable = False
    notes: list[str] = []
    stats = SimpleNamespace(rounds=0, prefix=None)

    def __init__(self, model: str, milliseconds: int, device: str = "cpu"):
        self.device = device
        self.model_name, self.pause, self.asked, self.steps = model, milliseconds / 1000, [], 0

    def flow(self, rows: int) -> Quick:
        self.rows = rows
        return self

    def suggest_rows(self, frames: int, size: tuple[int, int] = (1024, 768)) -> int:
        return 4

    @property
    def free(self) -> int:
        return self.rows - len(self.asked)

    @property
    def busy(self) -> bool:
        return bool(self.asked)

    def add(self, ticket: Any, frames: Sequence[Any], asked: Any, seed: int = 0) -> None:
        self.asked.append((ticket, frames, asked.text, seed))

    def step(self) -> list[Answer]:
        time.sleep(self.pause)
        if self._waits():
            return []
        ticket, frames, prompt, seed = self.asked.pop(0)
        if self.model_name == f"deadly:{ticket}":
            os.kill(os.getpid(), signal.SIGKILL)
        error = RuntimeError("it is broken") if self.model_name == "broken" else None
        self.steps += 1
        if self.model_name in ("lost", f"lost:{self.device}") and self.steps > 3:
            error = AcceleratorError("CUDA error: device-side assert triggered")
        text = hashlib.sha256(b"".join(frame.tobytes() for frame in frames)).hexdigest()[:16]
        finish = "length" if self.model_name == "cut" else "stop"
        return [Answer(ticket, f"{text} {len(frames)} {prompt} {seed}".strip(), 3, self.pause, error, finish)]

    def _waits(self) -> bool:
        kind, _, place = self.model_name.partition(":")
        return kind == "held" and Path(place).exists() and self.steps >= int(Path(place).read_text())


def load(
    model: str, drafter: str, device: str, dtype: str, max_new_tokens: int, temperature: float, **options: object
) -> Quick:
    if model == f"unloadable:{device}":
        raise RuntimeError(f"no memory on {device}")
    if model == "stillborn":
        os.kill(os.getpid(), signal.SIGKILL)
    return Quick(model, max_new_tokens, device)
