"""Records of a benchmark as a table on the screen, as Markdown, and as a plot."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmspec.app.compare import over
from mmspec.app.extras import installing
from mmspec.statistics import Stats

Record = dict[str, Any]

STOCK_PATHS = ("stock", "stock-static")

MEANING = {  # of the columns; stands in the JSON and the Markdown page
    "speedup_e2e": "wall time per generated token of stock generate over that of the method, prefill included; "
    "median over calls made side by side on the same input, with the quartiles in brackets",
    "speedup_decode": "the same without the time to the first token",
    "speedup_vs_best_stock": "speedup_e2e against the fastest of the stock paths in that cell (named in best_stock)",
    "tokens_per_target_call": "tokens a row gains per forward of the target after the prefill, bonus token "
    "included; what a draft holds past the end of its row is not counted",
    "accepted_per_call": "drafted tokens kept per row and forward: the same without the bonus token",
    "c": "time of one round of the method over the time of one step of stock, same input",
    "draft_share": "share of a round spent drafting (host clock); parts_ms has the time of each part",
    "drafter_kv_bytes": "keys and values that a feature drafter holds of a prompt once it has read it, per row",
    "drafter_visual_rows": "how many of the prompt's visual tokens (visual_tokens) stand in them, or what stands for "
    "them",
    "variant_of": "the method whose weights it has, with the switch in `setting` thrown when it drafts; nothing is "
    "trained again",
    "tau_by_depth": "what tokens_per_target_call would be if no draft were deeper than 1, 2, …",
    "ttft_ms": "time to the first token: prefill, and the drafter's own prefill",
    "tokens_per_s": "generated tokens of all rows over the whole call",
    "peak_mb": "MiB that one call held at its peak above what was held before it, the median of three calls, weights "
    "excluded: resident memory on a CPU, allocated memory on CUDA",
    "identical_rate": "share of rows token-identical to stock greedy; empty when sampling",
    "length": "mean number of generated tokens per row; differs between methods when sampling, hence times per token",
    "n": "timed calls",
}


def number(value: float | None, form: str) -> str:
    """A value in this form; a dash where there is none."""
    return "-" if value is None else form.format(value)


def figure(name: str, form: str) -> Callable[[Record], str]:
    """A column that shows one figure of a record."""
    return lambda record: number(record[name], form)


def ratio(name: str) -> Callable[[Record], str]:
    """A column that shows a ratio: median and quartiles."""
    return lambda record: spread_text(record, name)


def spread_text(record: Record, name: str) -> str:
    """Median and quartiles of a ratio."""
    if record[name] is None:
        return "-"
    return f"{record[name]:.2f}x ({record[name + '_p25']:.2f}-{record[name + '_p75']:.2f})"


def _visual(record: Record) -> str:
    """What a drafter holds of the visual tokens of a prompt."""
    rows = record["drafter_visual_rows"]
    return "-" if rows is None else f"{rows:.0f}/{record['visual_tokens']:.0f}"


Columns = tuple[tuple[str, Callable[[Record], str]], ...]
COLUMNS: Columns = (
    ("method", lambda r: r["method"]),
    ("speedup (quartiles)", ratio("speedup_e2e")),
    ("decode only", ratio("speedup_decode")),
    ("vs best stock", figure("speedup_vs_best_stock", "{:.2f}x")),
    ("tokens/call", figure("tokens_per_target_call", "{:.2f}")),
    ("accepted/call", figure("accepted_per_call", "{:.2f}")),
    ("c", figure("c", "{:.2f}")),
    ("draft", figure("draft_share", "{:.0%}")),
    ("draft ms", lambda r: number(r["parts_ms"].get("draft"), "{:.2f}")),
    ("drafter KV kB", lambda r: number(r["drafter_kv_bytes"] and r["drafter_kv_bytes"] / 1e3, "{:.0f}")),
    ("visual rows", _visual),
    ("TTFT ms", figure("ttft_ms", "{:.0f}")),
    ("tokens/s", figure("tokens_per_s", "{:.0f}")),
    ("peak MB", figure("peak_mb", "{:.0f}")),
    ("identical", figure("identical_rate", "{:.0%}")),
    ("length", figure("length", "{:.0f}")),
    ("n", lambda r: str(r["n"])),
    ("setting", lambda r: r.get("setting", "")),
)


class ReportError(Exception):
    """A report that cannot be made; the message says what to do."""


@dataclass(frozen=True)
class TableLayout:
    """How the records of one suite are shown: under which title, in which columns, and what these mean."""

    title: Callable[[Record], str]
    columns: Columns
    meaning: dict[str, str] = field(default_factory=dict)
    curves: Callable[[Any, list[Record]], None] | None = None  # draws the suite's records as curves, into a panel


def _cell(record: Record) -> str:
    return record["cell"] + (f", {record['category']}" if record["category"] != "all" else "")


LAYOUTS: dict[str, TableLayout] = {
    "vlm": TableLayout(_cell, COLUMNS, MEANING)
}  # by a record's suite; a suite adds its own


def spread(name: str, values: Sequence[float | None]) -> Record:
    """`name`, `name_p25` and `name_p75`: median and quartiles of what is there; None where nothing is."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return dict.fromkeys((name, f"{name}_p25", f"{name}_p75"))
    low, _, high = statistics.quantiles(there, n=4, method="inclusive") if len(there) > 1 else there * 3
    return {name: statistics.median(there), f"{name}_p25": low, f"{name}_p75": high}


def fastest(made: dict[str, list[Any]]) -> str:
    """The stock path with the least time per token."""
    return min((s for s in STOCK_PATHS if s in made), key=lambda s: statistics.median(c.per_token for c in made[s]))


def figures(name: str, calls: dict[str, list[Any]], best: str, greedy: bool, assisted: bool) -> Record:
    """What is read off the timed calls of one method; None where there is nothing to read.

    Args:
        calls: of every method, on the same inputs in the same order.
        best: the stock path for `speedup_vs_best_stock`.
        greedy: answers can be compared with those of stock.
        assisted: the method is transformers' own speculation, at batch 1.
    """
    made, stock = calls.get(name, []), calls["stock"]
    total = Stats()
    for call in made:
        total.add(call.stats or Stats())
    spent = sum(much for part, much in total.seconds.items() if part != "prefill")
    row_steps = total.row_rounds or (sum(c.steps for c in made) if assisted else 0)
    gain = sum(c.later for c in made) / row_steps if row_steps else (1.0 if made else None)
    rows = [(a, b) for m, s in zip(made, stock, strict=False) for a, b in zip(m.answers, s.answers, strict=True)]
    ends = [c.first for c in made]
    prompts = total.drafter.get("prompts", 0)
    by_depth = [round(total.acceptance(d), 4) for d in sorted(total.accepted_by_depth)]
    read = {name: much / prompts for name, much in total.drafter.items() if name != "prompts"} if prompts else {}
    return {
        "best_stock": best,
        "stock_path": name in STOCK_PATHS,
        **spread("speedup_e2e", over(stock, made, "per_token")),
        **spread("speedup_decode", over(stock, made, "decode_per_token")),
        **spread("speedup_vs_best_stock", over(calls[best], made, "per_token")),
        **spread("c", over(made, stock, "per_step")),
        **spread("ttft_ms", [1e3 * first for first in ends]),
        **spread("tokens_per_s", [1 / c.per_token for c in made]),
        **spread("step_ms", [1e3 * c.per_step if c.per_step else None for c in made]),
        "tokens_per_target_call": gain,
        "accepted_per_call": None if gain is None else gain - 1,
        "acceptance_by_depth": by_depth,
        "tau_by_depth": [round(1 + kept, 4) for kept in itertools.accumulate(by_depth)],
        "parts_ms": {p: 1e3 * s / total.rounds for p, s in total.seconds.items() if p != "prefill" and total.rounds},
        "draft_share": total.seconds.get("draft", 0.0) / spent if spent else None,
        "drafter_kv_bytes": read.get("memory bytes"),
        "drafter_visual_rows": read.get("visual rows"),
        "drafter": read,
        "identical_rate": statistics.fmean(a == b for a, b in rows) if rows and greedy else None,
        "length": statistics.fmean(len(a) for a, _ in rows) if rows else None,
        "n": len(made),
    }


def sections(records: list[Record]) -> dict[str, list[Record]]:
    """The records of each cell, under the cell's title."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(LAYOUTS[record["suite"]].title(record), []).append(record)
    return found


def meaning(records: list[Record]) -> dict[str, str]:
    """What the fields of these records mean."""
    found: dict[str, str] = {}
    for suite in dict.fromkeys(record["suite"] for record in records):
        found |= LAYOUTS[suite].meaning
    return found


def table(records: list[Record]) -> str:
    """For the screen: one block a cell, then what the columns mean and all notes."""
    lines = []
    for title, rows in sections(records).items():
        columns = LAYOUTS[rows[0]["suite"]].columns
        cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", title]
        for row in cells:
            padded = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]).rstrip())
        lines += [f"  {row['method']}: {row['note']}" for row in rows if row.get("note")]
    return "\n".join(lines).lstrip("\n")


def markdown(records: list[Record], provenance: Record, tuned: Record) -> str:
    """A page of its own: provenance, a table a cell, the meaning of the columns."""
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in provenance.items()), ""]
    for title, rows in sections(records).items():
        columns = LAYOUTS[rows[0]["suite"]].columns
        lines += [f"## {title}", "", "| " + " | ".join(name for name, _ in columns) + " |"]
        lines.append("|---" + "|--:" * (len(columns) - 1) + "|")
        lines += ["| " + " | ".join(show(row).replace("|", "\\|") for _, show in columns) + " |" for row in rows]
        lines += ["", *(f"{row['method']}: {row['note']}" for row in rows if row.get("note")), ""]
    lines += ["## What the columns mean", "", *(f"- `{name}`: {text}" for name, text in meaning(records).items())]
    chosen = [f"- {cell}: {m} {found['chosen']}" for cell, methods in tuned.items() for m, found in methods.items()]
    return "\n".join([*lines, *(["", "## Tuned on other images", "", *chosen] if chosen else [])]) + "\n"


def check_plot(path: Path) -> None:
    """ReportError now rather than after the measurement, where no plot could be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReportError(f"a plot needs matplotlib: {installing('bench')}, or leave --plot out")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ReportError(f"a plot is a .png, .svg or .pdf file; got {str(path)!r}")


def plot(records: list[Record], path: Path, title: str) -> None:
    """Speed-ups, one panel a cell, the whiskers being the quartiles; quality against speed where it was measured."""
    check_plot(path)
    from matplotlib.figure import Figure

    shown = {name: [r for r in rows if r.get("speedup_e2e") is not None] for name, rows in sections(records).items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    curves = next((drawn for r in records if (drawn := LAYOUTS[r["suite"]].curves)), None)
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


def _bars(panel: Any, name: str, rows: list[Record]) -> None:
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
