"""What mkdocs cannot know by itself: the command line's options, from its parsers, and the tables of benchmarks/."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
MARKER = "<!-- every verb with its options -->"


def on_files(files: Files, config: Any) -> Files:
    """The measured tables are pages too, and their raw numbers files, so that links to them work."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave docs/ for benchmarks/ stay inside the site."""
    inside = re.sub(r"\]\(\.\./benchmarks/", "](benchmarks/", markdown)
    return inside.replace(MARKER, "\n".join(verbs())) if MARKER in inside else inside


def verbs() -> Iterator[str]:
    """One section for every verb of `mmspec`."""
    from mmspec.app.cli import COMMANDS

    for name, (module, said) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"mmspec {name}", description=said[0].upper() + said[1:] + ".")
        importlib.import_module(module).configure(parser)
        yield from section(parser, 2)


def section(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Usage, description and one table of options for each group; then the same for the verbs below it."""
    usage = parser.format_usage().removeprefix("usage: ").strip()
    yield f"{'#' * level} {parser.prog}\n\n{parser.description or ''}\n\n```\n{usage}\n```\n"
    below: list[argparse.ArgumentParser] = []
    formatter = parser._get_formatter()  # argparse has no other way to say what `--help` says of one option
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                below += list(dict.fromkeys(action.choices.values()))
            elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
                rows.append((formatter._format_action_invocation(action), _help(formatter, action)))
        if rows:
            own = group.title not in ("options", "positional arguments")
            yield f"**{group.title[0].upper()}{group.title[1:]}**\n" * own
            yield "\n".join(["| | |", "|---|---|", *(f"| `{_cell(a)}` | {_cell(b)} |" for a, b in rows)]) + "\n"
    for each in below:
        yield from section(each, level + 1)


def _help(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """What `--help` says, with the default where that says nothing of it."""
    said, value = formatter._expand_help(action) if action.help else "", action.default
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if not value or value == argparse.SUPPRESS or action.nargs == 0 or "default" in said or f"({shown})" in said:
        return said
    return f"{said} (default: {shown.replace(f'{ROOT}/', '')})".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
