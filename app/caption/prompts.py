"""What is asked about each item: one prompt or a weighted file of them, with variables, and how its answer begins."""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from mmspec.app.media.items import Item

VARIABLES = ("name", "dir", "tags", "existing")
FORM = 'a text file has one prompt a line, or "2.5<TAB>prompt" with its weight; JSON is a list of "prompt" or '
FORM += '{"prompt": ..., "weight": 2.5}'


class PromptError(Exception):
    """A prompt, or a file of prompts, that cannot be used."""


@dataclass(frozen=True)
class PromptChoice:
    """What the model is asked about one item, with all variables filled in."""

    text: str
    system: str = ""
    start: str = ""  # the model's answer is made to begin with this
    prepend: str = ""  # these two are set around the answer afterwards, unseen by the model
    append: str = ""

    def caption(self, answer: str) -> str:
        """The caption that a model's answer gives; `start` is put before it unless it is there already."""
        answer = answer.strip()
        if not answer.startswith(self.start.strip()):
            answer = _joined(self.start.strip(), answer)
        return f"{self.prepend}{answer}{self.append}"


@dataclass(frozen=True)
class Prompts:
    """Prompts to choose from, each with its weight, and what all of them share."""

    choices: tuple[tuple[str, float], ...]
    system: str = ""
    start: str = ""
    prepend: str = ""
    append: str = ""

    def __post_init__(self) -> None:
        if not self.choices:
            raise PromptError("no prompt; give one with --prompt, or a file of them with --prompt-file")
        for text, weight in self.choices:
            _check(text, "prompt")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise PromptError(f"the weight {weight!r} of {_short(text)} is not a number above 0")
            if not text.strip():
                raise PromptError("a prompt is empty; write what to ask")
        for what in ("system", "start", "prepend", "append"):
            _check(getattr(self, what), what)

    @classmethod
    def read(cls, prompt: str | None = None, file: Path | str | None = None, **shared: str | None) -> Prompts:
        """One prompt, or a file of them; `shared` are system, start, prepend and append (None: nothing)."""
        if (prompt is None) == (file is None):
            raise PromptError("give either --prompt or --prompt-file")
        choices = [(prompt, 1.0)] if prompt is not None else _read(Path(str(file)))
        return cls(tuple(choices), **{what: text for what, text in shared.items() if text is not None})

    def of(self, item: Item, seed: int = 0) -> PromptChoice:
        """What to ask about an item: chosen by its name and the seed, so that the same run asks the same again."""
        place = PurePosixPath(item.name)
        folder = "" if place.parent == PurePosixPath() else place.parent.as_posix()
        values = {"name": place.stem, "dir": folder, "tags": ", ".join(item.tags), "existing": item.existing or ""}
        texts = (self._chosen(item.name, seed), self.system, self.start, self.prepend, self.append)
        return PromptChoice(*(text.format_map(values) for text in texts))

    def _chosen(self, name: str, seed: int) -> str:
        if len(self.choices) == 1:
            return self.choices[0][0]
        chance = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogatepass")).digest()[:6]) / 2**48
        *below, total = accumulate(weight for _, weight in self.choices)
        return self.choices[sum(chance * total >= bound for bound in below)][0]


def _read(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read the prompts in {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text; save it as such") from error
    choices = _from_json(text, path) if path.suffix.lower() == ".json" else _from_lines(text, path)
    if not choices:
        raise PromptError(f"{path} holds no prompt; {FORM}")
    try:
        Prompts(tuple(choices))
    except PromptError as error:
        raise PromptError(f"{path}: {error}") from error
    return choices


def _from_json(text: str, path: Path) -> list[tuple[str, Any]]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise PromptError(f"{path} is not JSON ({error}); {FORM}") from error
    if not isinstance(entries, list):
        raise PromptError(f"{path} holds a {type(entries).__name__}, not a list; {FORM}")
    choices = []
    for entry in entries:
        fields = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or fields.keys() - _FIELDS:
            raise PromptError(f"{path}: {_short(json.dumps(entry))} is not a prompt; {FORM}")
        choices.append((fields["prompt"], fields.get("weight", 1.0)))
    return choices


_FIELDS = {"prompt", "weight"}


def _from_lines(text: str, path: Path) -> list[tuple[str, Any]]:
    choices = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        weight, tab, prompt = line.partition("\t")
        try:
            choices.append((prompt.strip(), float(weight)) if tab else (line.strip(), 1.0))
        except ValueError as error:
            raise PromptError(f"{path}, line {number}: {weight!r} before the tab is not a weight; {FORM}") from error
    return choices


def _check(text: str, what: str) -> None:
    """Only plain {variables} of ours; a brace that is meant is written twice."""
    allowed = "use " + ", ".join(f"{{{name}}}" for name in VARIABLES) + "; write {{ and }} for braces"
    try:
        parts: Sequence[tuple] = list(string.Formatter().parse(text))
    except ValueError as error:
        raise PromptError(f"the {what} {_short(text)} has a brace too many ({error}); {allowed}") from error
    for _, name, form, conversion in parts:
        if name is not None and (name not in VARIABLES or form or conversion):
            given = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise PromptError(f"unknown variable {{{given}}} in the {what} {_short(text)}; {allowed}")


def _joined(start: str, answer: str) -> str:
    """Both with a space between, but none before punctuation that goes on with the last word."""
    return f"{start}{answer}" if not start or not answer or answer[0] in ",.;:!?'’)" else f"{start} {answer}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
