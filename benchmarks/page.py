"""Pages of results: a title, the conditions of the measurement, tables and notes, beside a file of all numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command() -> list[str]:
    """The words that started this script."""
    return ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]


def page(title: str, facts: Mapping[str, object], lines: Sequence[str]) -> str:
    """A page whose title is followed by the facts, and then by these lines."""
    return "\n".join([f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), "", *lines]) + "\n"


def heading(names: Sequence[object], first: str = "---") -> list[str]:
    """The first two lines of a table; its numbers stand to the right, and `first` says where the first column does."""
    return [f"| {' | '.join(map(str, names))} |", f"|{first}|" + "--:|" * (len(names) - 1)]


def save(out: Path | None, facts: Mapping[str, object], found: Mapping[str, object], text: str) -> None:
    """Write all numbers to `out`.json and the page to `out`.md, if `out` is given, and print the page."""
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps({"provenance": facts, **found}, separators=(",", ":")) + "\n")
        out.with_suffix(".md").write_text(text)
    print(text)
