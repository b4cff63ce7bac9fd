"""Prompts with variables for each item, and the caption made of the answer; prompt files."""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmspec.app.media.items import Item
from mmspec.media import shortened

VARIABLES = ("name", "dir", "existing")


@dataclass(frozen=True)
class PromptChoice:
    """The prompts for one item, with all variables filled in."""

    text: str
    system: str = ""
    prepend: str = ""  # this and `append` are put around the answer; the model does not see them
    append: str = ""
    further: tuple[str, ...] = ()  # further prompts about the same item

    @property
    def texts(self) -> tuple[str, ...]:
        return self.text, *self.further

    def caption(self, answer: str) -> str:
        """The caption for a model's answer."""
        return f"{self.prepend}{answer.strip()}{self.append}"


class PromptError(argparse.ArgumentTypeError):
    """A prompt is invalid; of the file of a flag, argparse prints the message."""


@dataclass(frozen=True)
class Prompts(PromptChoice):
    """The prompts before the variables are filled in. PromptError if one is invalid."""

    def __post_init__(self) -> None:
        if not all(text.strip() for text in self.texts):
            raise PromptError("the prompt is empty; write what to ask")
        for what, text in vars(self).items():
            for one in (text,) if isinstance(text, str) else text:
                _check(one, what if what in ("system", "prepend", "append") else "prompt")

    def of(self, item: Item) -> PromptChoice:
        place = PurePosixPath(item.name.encode("utf-8", "backslashreplace").decode())  # names need not be valid Unicode
        folder = "" if place.parent == PurePosixPath() else place.parent.as_posix()
        values = {"name": place.stem, "dir": folder, "existing": item.existing or ""}
        filled: dict[str, Any] = {
            what: text.format_map(values) if isinstance(text, str) else tuple(one.format_map(values) for one in text)
            for what, text in vars(self).items()
        }
        return PromptChoice(**filled)


def _check(text: str, what: str) -> None:
    """Allow only plain {variables} with a name in VARIABLES; literal braces are doubled."""
    allowed = "use " + ", ".join(f"{{{name}}}" for name in VARIABLES) + "; write {{ and }} for braces"
    try:
        parts: Sequence[tuple] = list(string.Formatter().parse(text))
    except ValueError as error:
        raise PromptError(f"the {what} {shortened(text)} has an unmatched brace ({error}); {allowed}") from error
    for _, name, form, conversion in parts:
        if name is not None and (name not in VARIABLES or form or conversion):
            given = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise PromptError(f"unknown variable {{{given}}} in the {what} {shortened(text)}; {allowed}")


def read_prompts(path: str | Path) -> list[str]:
    """The prompts in a file: its lines that are not empty. PromptError if it cannot be read, or holds none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompts of {str(path)!r}: {error}") from error
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise PromptError(f"{path} has no prompts; write one per line")
    return lines
