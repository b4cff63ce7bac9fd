"""Prompts for `real.py`: chats, and texts whose answers repeat parts of the prompt; and lessons for `real_train.py`.

The lessons are about other subjects: each sentence of a group in `real_prompts.yaml` with each of its words, and
docstrings and sources of Python's standard library, which depend on Python's version.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml


class RealPrompt(NamedTuple):
    """A prompt; with `chat` it is a user's turn, otherwise the beginning of a text to continue."""

    text: str
    chat: bool = True


DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _record(number: int) -> str:
    place = ("Berlin", "Madrid", "Oslo", "Rome", "Paris", "Vienna")[number % 6]
    return (
        f'  {{"id": {number}, "name": "sensor-{number}", "location": "{place}", "status": "active", '
        f'"unit": "celsius", "interval_seconds": 60, "tags": ["indoor", "temperature"]}}'
    )


def _json(first: int, count: int) -> RealPrompt:
    """A list of JSON records to continue."""
    return RealPrompt("[\n" + ",\n".join(_record(first + i) for i in range(count)) + ",\n", chat=False)


def _edit(function: Callable[..., object], what: str) -> RealPrompt:
    source = textwrap.dedent(inspect.getsource(function)).strip()
    return RealPrompt(f"{what} Answer with the whole function and nothing else.\n\n```python\n{source}\n```")


def _copy(passage: str) -> RealPrompt:
    return RealPrompt(f"Correct the spelling mistakes in this text, and repeat the whole of it:\n\n{passage}")


def _summary(passage: str) -> RealPrompt:
    return RealPrompt(f"Summarize this text in its own words and phrases:\n\n{passage}")


def _tests(count: int) -> RealPrompt:
    """A file of tests to continue."""
    tests = (f"def test_add_{n}():\n    assert add({n}, {n + 1}) == {2 * n + 1}\n\n\n" for n in range(count))
    return RealPrompt("".join(tests), chat=False)


def repeating() -> list[RealPrompt]:
    """Summaries, corrections, edits of functions of the standard library, and JSON and tables to continue."""
    rename = "Add type annotations to this function."
    comment = "Add a comment to this function."
    first, second = DATA["passages"]
    return [
        _json(1, 5),
        _copy(first),
        _edit(textwrap.shorten, comment),
        _summary(first),
        _edit(inspect.cleandoc, rename),
        _copy(second),
        _json(12, 4),
        _summary(second),
        _edit(textwrap.indent, rename),
        _edit(inspect.getmodulename, comment),
        _tests(4),
        RealPrompt("".join(f"| {n} | {n * n} | {n**3} |\n" for n in range(1, 9)), False),
    ]


def chats() -> list[RealPrompt]:
    """Questions, whose answers repeat little."""
    return [RealPrompt(text) for text in DATA["questions"]]


# Padded to the longest one, so that one static cache fits all.
WARM_UP = RealPrompt(inspect.getsource(textwrap.TextWrapper._handle_long_word), chat=False)
KINDS: dict[str, Callable[[], list[RealPrompt]]] = {"chats": chats, "repeating": repeating}

MODULES = """
    argparse asyncio base64 bisect calendar collections concurrent.futures configparser contextlib copy csv
    datetime decimal difflib email.utils fractions functools glob gzip hashlib heapq html http.client inspect io
    itertools json logging math operator os os.path pathlib pickle pprint queue random re shutil socket sqlite3
    statistics string subprocess tempfile textwrap threading time unittest urllib.parse uuid zipfile
"""
ASKING = (
    "Explain in your own words what `{name}` does. Its documentation says: {text}",
    "Give a short example in Python that uses `{name}`: {text}",
    "Summarize this text in its own words and phrases:\n\n{text}",
    "Correct the spelling mistakes in this text, and repeat the whole of it:\n\n{text}",
    "When would one use `{name}`? {text}",
)
EDITING = ("Add type annotations to this function.", "Add a comment to this function.", "Rename the first argument.")
EDIT = "{what} Answer with the whole function and nothing else.\n\n```python\n{source}\n```"
LONGEST, SOURCE = 300, 600  # length in characters of a docstring, and of a source


def lesson_chats() -> list[str]:
    """Every sentence with every word of its group."""
    return [
        sentence.format(word.strip())
        for group in DATA["lessons"]
        for word in group["words"].split(";")
        for sentence in group["sentences"]
    ]


def _callables() -> Iterator[tuple[str, Callable[..., object]]]:
    for module in MODULES.split():
        for name, one in sorted(vars(importlib.import_module(module)).items()):
            if callable(one) and not name.startswith("_"):
                yield f"{module}.{name}", one


def _source(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function).strip()
    except OSError:  # generated at run time
        return ""


def texts() -> list[str]:
    """A prompt for each distinct docstring, and one for each function with a short source."""
    said: dict[str, str] = {}
    sources: dict[str, None] = {}
    for name, one in _callables():
        text = inspect.getdoc(one)
        if text and len(text) > 40:
            said.setdefault(" ".join(text.split())[:LONGEST], name)
        if inspect.isfunction(one) and 0 < len(source := _source(one)) <= SOURCE:
            sources[source] = None
    asked = [ASKING[n % len(ASKING)].format(name=name, text=text) for n, (text, name) in enumerate(said.items())]
    return asked + [EDIT.format(what=EDITING[n % 3], source=source) for n, source in enumerate(sources)]


def lessons(seed: int, share: float = 0.2) -> list[str]:
    """All chats, plus texts up to this share, in a seeded order, without any prompt that is measured."""
    rng = np.random.default_rng(seed)
    measured = {prompt.text for ask in KINDS.values() for prompt in ask()}
    told = [text for text in lesson_chats() if text not in measured]
    other = [text for text in texts() if text not in measured]
    rest = rng.permutation(len(other))[: round(len(told) * share / (1 - share))]
    asked = told + [other[place] for place in rest]
    return [asked[place] for place in rng.permutation(len(asked))]
