"""Shows the records of a benchmark as tables, in a terminal and in Markdown; `tables.yaml` defines the columns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmspec.statistics import Stats

Record = dict[str, Any]
TABLES = Path(__file__).with_name("tables.yaml")
LAYOUTS: dict[str, dict[str, Any]] = yaml.safe_load(TABLES.read_text())

SUMMARIES: list[Callable[[Sequence[Record]], dict[str, list[list[str]]]]] = []  # further tables, by title


def number(value: float | Record | None, form: str) -> str:
    """A formatted value; a dash for None."""
    return "-" if value is None else form.format(value)


OWN: dict[str, Callable[[Record], str]] = {  # fields with their own format
    "drafter_visual_rows": lambda r: number(r["drafter_visual_rows"], f"{{:.0f}}/{r.get('visual_tokens') or 0:.0f}"),
    "lossless": lambda r: {True: "kept", False: "changed", None: "-"}[r["lossless"]],
    "shares": lambda r: number(r["shares"], "{0[draft]:.0%} {0[verify]:.0%} {0[other]:.0%}").replace("%", ""),
    "spent": lambda r: number(None if r["lossless"] else r["spent"], f"{{:.2f}} ({r.get('spent_max') or 0:.2f})"),
    "exact_seed": lambda r: number(r["identical_rate"] if r["exact_seed"] else None, "{:.0%}"),
    "refused": lambda r: "refused" if r.get("refused") else cell(r, "speedup_e2e ratio"),
}
TITLES: dict[str, Callable[[Record], str]] = {  # titles that need more than a format string
    "vlm": lambda r: r["cell"] + (f", {r['category']}" if r["category"] != "all" else ""),
}


def cell(record: Record, spec: str) -> str:
    """The text of a column for a record; a column of `tables.yaml` is FIELD[/UNIT][|MISSING] [FORM]."""
    name, _, form = spec.partition(" ")
    if name in OWN:
        return OWN[name](record)
    name, bar, missing = name.partition("|")
    name, _, unit = name.partition("/")
    value: Any = record
    for part in name.split("."):
        value = value.get(part)
    if value is None:
        return missing if bar else "-"
    if form == "ratio":
        return f"{value:.2f}x ({record[name + '_p25']:.2f}-{record[name + '_p75']:.2f})"
    return (form or "{}").format(value / float(unit) if unit else value, **record)


def spread(name: str, values: Sequence[float | None]) -> Record:
    """`name`, `name_p25` and `name_p75`: median and quartiles of the values that are not None; None without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys((name, f"{name}_p25", f"{name}_p75"))
    low, _, high = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {name: statistics.median(known), f"{name}_p25": low, f"{name}_p75": high}


def fastest(calls: dict[str, list[Any]], paths: Sequence[str], cost: str) -> str:
    """The path without drafts whose calls have the least median `cost`."""
    return min((p for p in paths if p in calls), key=lambda p: statistics.median(getattr(c, cost) for c in calls[p]))


def total(calls: Sequence[Any]) -> Stats:
    """The sum of the stats of these calls."""
    whole = Stats()
    for call in calls:
        whole.add(call.stats or Stats())
    return whole


def sections(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each cell, under the cell's title."""
    cells: dict[str, list[Record]] = {}
    for record in records:
        title = LAYOUTS[record["suite"]]["title"]
        cells.setdefault(TITLES.get(title, title.format_map)(record), []).append(record)
    return cells


def tables(records: Sequence[Record], wide: bool) -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """Yield each table's title, rows (the head first) and notes.

    Unless `wide`, a table has only the columns that fit on a screen.
    """
    for title, rows in sections(records).items():
        layout = LAYOUTS[rows[0]["suite"]]
        columns = layout["columns"]
        if not wide and "narrow" in layout:
            columns = {name: columns[name] for name in layout["narrow"]}
        cells = ([cell(row, spec) for spec in columns.values()] for row in rows)
        yield title, [[*columns], *cells], [f"{row['method']}: {row['note']}" for row in rows if row.get("note")]
    for summary in SUMMARIES:
        yield from ((title, rows, []) for title, rows in summary(records).items())


def table(records: Sequence[Record]) -> str:
    """The tables as text: the first column is left-aligned, the others right-aligned; notes follow."""
    lines = []
    for title, cells, notes in tables(records, wide=False):
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)
        lines += ["", title, *map(str.rstrip, aligned), *(f"  {note}" for note in notes)]
    return "\n".join(lines).lstrip("\n")


def markdown(records: Sequence[Record], provenance: Record, tuned: Record) -> str:
    """A Markdown page: provenance, the tables, the meaning of the columns, and tuned settings."""
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in provenance.items()), ""]
    for title, cells, notes in tables(records, wide=True):
        head, *rows = ("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells)
        lines += [f"## {title}", "", head, "|---" + "|--:" * (len(cells[0]) - 1) + "|", *rows, "", *notes, ""]
    suites = dict.fromkeys(record["suite"] for record in records)
    meanings = {name: text for suite in suites for name, text in LAYOUTS[suite]["meaning"].items()}
    lines += ["## What the columns mean", "", *(f"- `{name}`: {text}" for name, text in meanings.items())]
    chosen = [f"- {cell}: {m} {tried['chosen']}" for cell, methods in tuned.items() for m, tried in methods.items()]
    return "\n".join([*lines, *(["", "## Tuned on other images", "", *chosen] if chosen else [])]) + "\n"
