"""Shows the records of a benchmark as tables, Markdown and plots; `tables.yaml` defines the columns."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from mmspec.app.compare import over
from mmspec.app.extras import installing
from mmspec.statistics import Stats

if TYPE_CHECKING:  # an extra
    from matplotlib.axes import Axes

Record = dict[str, Any]
STOCK_PATHS = ("stock", "stock-static")
NO_DATA = ("data", "picture", "pair", "clip")  # kinds that are not names of data sets
TABLES = Path(__file__).with_name("tables.yaml")
LAYOUTS: dict[str, dict[str, Any]] = yaml.safe_load(TABLES.read_text())
CURVES: dict[str, Callable[[Axes, list[Record]], None]] = {}  # by suite, a function that draws its records into a panel


def number(value: float | Record | None, form: str) -> str:
    """A formatted value; a dash for None."""
    return "-" if value is None else form.format(value)


OWN: dict[str, Callable[[Record], str]] = {  # fields with their own format
    "drafter_visual_rows": lambda r: number(r["drafter_visual_rows"], f"{{:.0f}}/{r.get('visual_tokens') or 0:.0f}"),
    "lossless": lambda r: {True: "kept", False: "bent", None: "-"}[r["lossless"]],
    "shares": lambda r: number(r["shares"], "{0[draft]:.0%} {0[verify]:.0%} {0[other]:.0%}").replace("%", ""),
    "spent": lambda r: number(None if r["lossless"] else r["spent"], f"{{:.2f}} ({r.get('spent_max') or 0:.2f})"),
    "exact_seed": lambda r: number(r["identical_rate"] if r["exact_seed"] else None, "{:.0%}"),
    "refused": lambda r: "refused" if r.get("refused") else cell(r, "speedup_e2e ratio"),
}
TITLES: dict[str, Callable[[Record], str]] = {  # titles that need more than a format string
    "vlm": lambda r: r["cell"] + (f", {r['category']}" if r["category"] != "all" else ""),
    "caption": lambda r: (
        f"{r['captions']} {r.get('asked', 'captions')}, {r['rows']} row{'s' * (r['rows'] > 1)} at once"
    ),
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


class ReportError(Exception):
    """A report cannot be written; the message says what to do."""


def spread(name: str, values: Sequence[float | None]) -> Record:
    """`name`, `name_p25` and `name_p75`: median and quartiles of the values that are not None; None without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys((name, f"{name}_p25", f"{name}_p75"))
    low, _, high = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {name: statistics.median(known), f"{name}_p25": low, f"{name}_p75": high}


def fastest(calls: dict[str, list[Any]], paths: Sequence[str] = STOCK_PATHS, cost: str = "per_token") -> str:
    """The path without drafts whose calls have the least median `cost`."""
    return min((p for p in paths if p in calls), key=lambda p: statistics.median(getattr(c, cost) for c in calls[p]))


def total(calls: Sequence[Any]) -> Stats:
    """The sum of the stats of these calls."""
    whole = Stats()
    for call in calls:
        whole.add(call.stats or Stats())
    return whole


def figures(name: str, calls: dict[str, list[Any]], best: str, greedy: bool, assisted: bool) -> Record:
    """The figures of one method from its timed calls; None for those that do not apply.

    Args:
        calls: of every method, on the same inputs in the same order.
        best: the stock path for `speedup_vs_best_stock`.
        greedy: answers can be compared with those of stock.
        assisted: the method is transformers' own speculation, at batch 1.
    """
    own, stock = calls.get(name, []), calls["stock"]
    whole = total(own)
    spent = sum(much for part, much in whole.seconds.items() if part != "prefill")
    row_steps = whole.row_rounds or (sum(c.steps for c in own) if assisted else 0)
    gain = sum(c.later for c in own) / row_steps if row_steps else (1.0 if own else None)
    rows = [(a, b) for m, s in zip(own, stock, strict=False) for a, b in zip(m.answers, s.answers, strict=True)]
    firsts = [c.first for c in own]
    prompts = whole.drafter.get("prompts", 0)
    by_depth = [round(whole.acceptance(d), 4) for d in sorted(whole.accepted_by_depth)]
    read = {name: much / prompts for name, much in whole.drafter.items() if name != "prompts"} if prompts else {}
    return {
        "best_stock": best,
        "stock_path": name in STOCK_PATHS,
        **spread("speedup_e2e", over(stock, own, "per_token")),
        **spread("speedup_decode", over(stock, own, "decode_per_token")),
        **spread("speedup_vs_best_stock", over(calls[best], own, "per_token")),
        **spread("c", over(own, stock, "per_step")),
        **spread("ttft_ms", [1e3 * first for first in firsts]),
        **spread("tokens_per_s", [1 / c.per_token for c in own]),
        **spread("step_ms", [1e3 * c.per_step if c.per_step else None for c in own]),
        "tokens_per_target_call": gain,
        "accepted_per_call": None if gain is None else gain - 1,
        "acceptance_by_depth": by_depth,
        "tau_by_depth": [round(1 + kept, 4) for kept in itertools.accumulate(by_depth)],
        "parts_ms": {p: 1e3 * s / whole.rounds for p, s in whole.seconds.items() if p != "prefill" and whole.rounds},
        "draft_share": whole.seconds.get("draft", 0.0) / spent if spent else None,
        "nodes_per_call": 1 + whole.drafted / whole.row_rounds if whole.row_rounds else 1.0,
        "drafter_kv_bytes": read.get("memory bytes"),
        "drafter_visual_rows": read.get("visual rows"),
        "drafter": read,
        "identical_rate": statistics.fmean(a == b for a, b in rows) if rows and greedy else None,
        "length": statistics.fmean(len(a) for a, _ in rows) if rows else None,
        "n": len(own),
    }


def sections(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each cell, under the cell's title."""
    cells: dict[str, list[Record]] = {}
    for record in records:
        title = LAYOUTS[record["suite"]]["title"]
        cells.setdefault(TITLES.get(title, title.format_map)(record), []).append(record)
    return cells


def meaning(records: Sequence[Record]) -> dict[str, str]:
    """The meaning of the columns of the records' suites, by name."""
    layouts = [LAYOUTS[suite] for suite in dict.fromkeys(one.get("suite") for one in records) if suite in LAYOUTS]
    return {name: text for layout in layouts for name, text in layout["meaning"].items()}


def tables(records: Sequence[Record], wide: bool = True) -> Iterator[tuple[str, list[list[str]], list[str] | None]]:
    """Yield each table's title, rows (the head first) and notes; for a summary of several data sets, notes are None.

    Unless `wide`, a table has only the columns that fit on a screen.
    """
    for title, rows in sections(records).items():
        layout = LAYOUTS[rows[0]["suite"]]
        columns = layout["columns"]
        if not wide and "narrow" in layout:
            columns = {name: columns[name] for name in layout["narrow"]}
        cells = ([cell(row, spec) for spec in columns.values()] for row in rows)
        yield title, [[*columns], *cells], [f"{row['method']}: {row['note']}" for row in rows if row.get("note")]
    for title, rows_by_data in data_tables(records).items():
        yield title, rows_by_data, None


def data_tables(records: Sequence[Record]) -> dict[str, list[list[str]]]:
    """Tables of several data sets as in papers, by condition: rows are methods, columns are data sets and their mean.

    A cell has tokens per target call and the speed-up over stock. A condition with only one data set has no table.
    """
    conditions: dict[str, dict[str, dict[str, Record]]] = {}  # condition → data set → method → record
    for record in records:
        if record["suite"] == "vlm" and record["category"] == "all" and record["kind"] not in NO_DATA:
            prompt = f", {record['prompt']} prompt" if record["prompt"] else ""
            title = f"tokens/call, speedup: batch {record['batch']}, temperature {record['temperature']:g}{prompt}"
            conditions.setdefault(title, {}).setdefault(record["kind"], {})[record["method"]] = record
    tables = {}
    for title, sets in conditions.items():
        methods = {name: [one.get(name) for one in sets.values()] for each in sets.values() for name in each}
        rows = [[name, *(_mean([one]) for one in found), _mean(found)] for name, found in methods.items()]
        tables[title] = [["method", *sets, "mean"], *rows]
    return {title: rows for title, rows in tables.items() if len(conditions[title]) > 1}


def _mean(records: Sequence[Record | None]) -> str:
    """The means over these records; a dash if a value is missing."""
    pairs = [(r["tokens_per_target_call"], r["speedup_e2e"]) for r in records if r is not None]
    if len(pairs) < len(records) or not all(map(all, pairs)):
        return "-"
    return "{:.2f}, {:.2f}x".format(*map(statistics.fmean, zip(*pairs, strict=True)))


def table(records: Sequence[Record], wide: bool = False) -> str:
    """The tables as text: the first column is left-aligned, the others right-aligned; notes follow."""
    lines = []
    for title, cells, notes in tables(records, wide):
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)
        lines += ["", title, *map(str.rstrip, aligned), *(f"  {note}" for note in notes or ())]
    return "\n".join(lines).lstrip("\n")


def markdown(records: Sequence[Record], provenance: Record, tuned: Record) -> str:
    """A Markdown page: provenance, the tables, the meaning of the columns, and tuned settings."""
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in provenance.items()), ""]
    for title, cells, notes in tables(records):
        head, *rows = ("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells)
        lines += [f"## {title}", "", head, "|---" + "|--:" * (len(cells[0]) - 1) + "|", *rows, ""]
        lines += [] if notes is None else [*notes, ""]
    lines += ["## What the columns mean", "", *(f"- `{name}`: {text}" for name, text in meaning(records).items())]
    chosen = [f"- {cell}: {m} {tried['chosen']}" for cell, methods in tuned.items() for m, tried in methods.items()]
    return "\n".join([*lines, *(["", "## Tuned on other images", "", *chosen] if chosen else [])]) + "\n"


def check_plot(path: Path) -> None:
    """Check before the measurement that a plot can be written; ReportError if not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReportError(f"a plot needs matplotlib: {installing('bench')}, or leave --plot out")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ReportError(f"a plot is a .png, .svg or .pdf file; got {str(path)!r}")


def plot(records: list[Record], path: Path, title: str) -> None:
    """Plot speed-ups, one panel per cell, with quartiles as whiskers; and quality against speed if it was measured."""
    check_plot(path)
    from matplotlib.figure import Figure

    shown = {name: [r for r in rows if r.get("speedup_e2e") is not None] for name, rows in sections(records).items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    curves = next((CURVES[r["suite"]] for r in records if r["suite"] in CURVES), None)
    count = len(shown) + (curves is not None)
    across = min(2, max(1, count))
    down = max(1, -(-count // across))
    bars = max(map(len, shown.values()), default=0)
    figure = Figure(figsize=(6.4 * across, 0.9 + max(2.3, 0.22 * bars) * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, (name, rows) in zip(panels, shown.items(), strict=False):
        _bars(panel, name, rows)
    if curves is not None:
        curves(panels[len(shown)], records)
    for panel in panels[count:]:
        panel.set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _bars(panel: Axes, name: str, rows: list[Record]) -> None:
    middle = [r["speedup_e2e"] for r in rows]
    low, high = ([r[f"speedup_e2e_{end}"] for r in rows] for end in ("p25", "p75"))
    whiskers = [np.subtract(middle, low), np.subtract(high, middle)]
    colours = ["#9aa3ad" if r["stock_path"] else "#2f6fb0" for r in rows]
    panel.barh([r["method"] for r in rows], middle, xerr=whiskers, color=colours, ecolor="#333333", capsize=2)
    panel.axvline(1.0, color="#333333", linewidth=0.8)
    panel.invert_yaxis()
    panel.set_title(name, fontsize=9)
    panel.set_xlabel("speed-up over plain decoding, end to end", fontsize=9)
    for place, value in enumerate(middle):
        panel.text(0.03, place, f"{value:.2f}x", va="center", fontsize=8, color="white")
