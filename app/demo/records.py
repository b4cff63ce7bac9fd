"""The Drafters tab: the bench's records, chosen by suite and filters, and where each number comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from mmspec.app.demo.tab import QUICK

MEASURES = {  # what records may hold: (label, unit)
    "speedup_e2e": ("speed-up, end to end", "×"),
    "speedup_decode": ("speed-up, decoding only", "×"),
    "speedup_vs_best_stock": ("speed-up over the best stock path", "×"),
    "speedup_vs_best_plain": ("speed-up over the best plain path", "×"),
    "tokens_per_target_call": ("tokens per model call", ""),
    "accepted_per_call": ("drafted tokens accepted per call", ""),
    "compression": ("tokens per forward", ""),
    "forwards": ("forwards a picture", ""),
    "c": ("c: time of a round, in plain steps", ""),
    "tokens_per_s": ("tokens/s", ""),
    "ttft_ms": ("time to first token", " ms"),
    "seconds_per_image": ("time of a picture", " s"),
    "peak_mb": ("peak memory", " MB"),
    "identical_rate": ("identical outputs", ""),
    "fd_over_noise": ("Fréchet distance to plain decoding, over noise", ""),
    "fd_real": ("Fréchet distance to real pictures", ""),
    "precision": ("precision", ""),
    "recall": ("recall", ""),
    "faithfulness": ("faithful to the prompt", ""),
    "spent": ("distortion charged a picture", ""),
    "spent_per_token": ("distortion charged a token", ""),
}
SETTINGS = ("model", "kernel", "batch", "rows", "context", "temperature", "prompt", "file")  # that tell records apart
ALL = "all"
FILTERS = ("model", "batch", "temperature", "prompt", "distribution")
MOST = 400  # records of a table, or dots
BARS = 12
LINES = 8  # of acceptance by depth
COLOURS = {"lossless": "#16a34a", "lossy": "#ea580c", "without mmspec": "#788496"}
NONE = (
    '<p class="mm-hint">No measurements yet: there is no record in <code>{}</code>. <code>mmspec bench</code> writes '
    "them; start the demo with <code>--results FOLDER</code> to show those of another folder.</p>"
)
Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Choice:
    """What of the records is shown."""

    suite: str
    measure: str = "speedup_e2e"
    across: str = "tokens_per_target_call"
    methods: tuple[str, ...] = ()  # none: all
    filters: tuple[str, ...] = (ALL,) * len(FILTERS)


@dataclass(frozen=True)
class ResultFolder:
    """All records of a folder, and what the files say about themselves."""

    folder: Path
    records: list[dict[str, Any]]
    provenance: dict[str, dict[str, Any]]  # by file name
    meaning: dict[str, str]  # of the fields, as the files tell
    trouble: list[str]  # files that could not be read

    @property
    def suites(self) -> list[str]:
        """The one with the most to say about speed-ups first."""
        found = dict.fromkeys(str(r.get("suite", "?")) for r in self.records)
        return sorted(found, key=lambda suite: (suite != "vlm", suite))

    def of(self, suite: str) -> list[dict[str, Any]]:
        return [r for r in self.records if str(r.get("suite", "?")) == suite]

    def measures(self, suite: str) -> list[str]:
        """Those that this suite has values of."""
        return [name for name in MEASURES if any(r.get(name) is not None for r in self.of(suite))]

    def choices(self, suite: str, name: str) -> list[str]:
        """What a filter can be set to."""
        found = {_field(record, name) for record in self.of(suite)} - {None}
        return [ALL, *map(str, sorted(found, key=lambda v: (isinstance(v, str), v)))]

    def usual(self, suite: str) -> tuple[str, ...]:
        """What the filters are set to at first: one model and one setting, those of the suite's first record."""
        first = self.of(suite)[0]
        known = ((name, _field(first, name)) for name in FILTERS)
        return tuple(ALL if name == "distribution" or value is None else str(value) for name, value in known)

    def chosen(self, choice: Choice) -> list[dict[str, Any]]:
        wanted = [(n, v) for n, v in zip(FILTERS, choice.filters, strict=True) if v and v != ALL]
        found = [r for r in self.of(choice.suite) if all(str(_field(r, n)) == v for n, v in wanted)]
        return [r for r in found if not choice.methods or str(r.get("method")) in choice.methods][:MOST]


def _field(record: dict[str, Any], name: str) -> Any:
    if name == "distribution":
        lossless = record.get("lossless")
        return None if lossless is None else "lossless" if lossless else "lossy"
    return record.get(name)


def read(folder: Path) -> ResultFolder:
    """The records of every *.json of a folder; a file that is none of the bench's is named, never fatal."""
    records: list[dict[str, Any]] = []
    provenance: dict[str, dict[str, Any]] = {}
    meaning: dict[str, str] = {}
    trouble = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            provenance[path.name] = told = dict(content["provenance"])
            model = {"model": told["model"]} if told.get("model") else {}
            rows = [{**model, **row, "file": path.name} for row in content.get("records", ()) if MEASURES.keys() & row]
            meaning |= {str(k): str(v) for k, v in dict(content.get("meaning", {})).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            trouble.append(f"{path.name}: it holds no records of mmspec bench")
            continue
        records += rows
    return ResultFolder(folder, records, provenance, meaning, trouble)


def kind(record: dict[str, Any]) -> str:
    """What a bar or dot is coloured by."""
    if str(record.get("method", "")).split("-")[0] in ("stock", "ar", "hf"):
        return "without mmspec"
    return "lossless" if record.get("lossless", True) else "lossy"


def named(records: Records) -> list[str]:
    """The records' methods, with whatever else tells them apart."""
    telling = [name for name in SETTINGS if name == "model" or len({str(r.get(name)) for r in records}) > 1]
    words = {"batch": "batch {}", "rows": "{} rows", "context": "context {}", "temperature": "T {}"}
    said = [[words.get(t, "{}").format(r[t]) for t in telling if r.get(t) is not None] for r in records]
    return [" · ".join([str(r.get("method", "?")), *rest]) for r, rest in zip(records, said, strict=True)]


def value(record: dict[str, Any], name: str) -> float:
    """A measure of a record; NaN where it has none."""
    found = record.get(name)
    return float(found) if isinstance(found, (int, float)) else math.nan


def ranked(records: Records, measure: str, across: str) -> pd.DataFrame:
    """A row a record, the most of the measure first: who it is, its kind, both measures and the quartiles."""
    frame = pd.DataFrame({
        "method": named(records), "kind": list(map(kind, records)),
        "value": [value(r, measure) for r in records], "against": [value(r, across) for r in records],
        "lower quartile": [value(r, f"{measure}_p25") for r in records],
        "upper quartile": [value(r, f"{measure}_p75") for r in records],
    })  # fmt: skip
    return frame[frame["value"].notna()].sort_values("value", ascending=False, kind="stable")


def depths(records: Records, measure: str) -> pd.DataFrame:
    """How often a draft is right up to a depth: of the records with the most of the measure."""
    known = [r for r in records if r.get("acceptance_by_depth")]
    known = sorted(known, key=lambda r: -value(r, measure) if math.isfinite(value(r, measure)) else 0.0)[:LINES]
    rows = [(name, depth, kept) for name, r in zip(named(known), known, strict=True)
            for depth, kept in enumerate(r["acceptance_by_depth"], 1)]  # fmt: skip
    return pd.DataFrame(rows, columns=["method", "depth", "kept"])


def table(records: Records, measure: str) -> pd.DataFrame:
    """All measures that the records hold; the most of the chosen one first."""
    shown = [name for name in MEASURES if any(math.isfinite(value(r, name)) for r in records)]
    told = [name for name in (*SETTINGS, "setting", "n") if any(r.get(name) not in (None, "") for r in records)]
    ordered = sorted(records, key=lambda r: -value(r, measure) if math.isfinite(value(r, measure)) else math.inf)
    rows = [{"method": str(r.get("method", "?")), "distribution": kind(r), **{name: r.get(name) for name in told},
             **{MEASURES[name][0]: round(value(r, name), 4) for name in shown}} for r in ordered]  # fmt: skip
    return pd.DataFrame(rows)


def origins(bench: ResultFolder, choice: Choice, records: Records) -> str:
    """What the measures mean; commit, device, versions, whatever the files say of how they were made."""
    parts = [f'<p class="mm-badge mm-different">left out {escape(t)}</p>' for t in bench.trouble]
    if not bench.records:
        return "".join([*parts, NONE.format(escape(str(bench.folder)))])
    if not records:
        parts.append('<p class="mm-hint">No record passes these filters. Set one of them back to “all”.</p>')
    for name in dict.fromkeys((choice.measure, choice.across)):
        if name in bench.meaning:
            said = f"<b>{escape(MEASURES[name][0])}</b>: {escape(bench.meaning[name])}"
            parts.append(f'<p class="mm-small">{said}</p>')
    for name in sorted({r["file"] for r in records}):
        told = "".join(
            f"<div><dt>{escape(str(k))}</dt><dd>{escape(v if isinstance(v, str) else json.dumps(v))}</dd></div>"
            for k, v in bench.provenance[name].items()
        )
        summary = f"<summary>Where {escape(name)} comes from</summary>"
        parts.append(f'<details class="mm-origin">{summary}<dl>{told}</dl></details>')
    return "".join(parts)


def shown(bench: ResultFolder, choice: Choice) -> tuple[Any, ...]:
    """What the bars, the dots, the lines, the table and the notes show of a choice."""
    records = bench.chosen(choice)
    frame, (label, unit) = ranked(records, choice.measure, choice.across), MEASURES[choice.measure]
    up, right = f"{label}{unit and f' in{unit}' if unit != '×' else ' (×)'}", MEASURES[choice.across][0]
    dots = frame[frame["against"].notna()]
    return (
        gr.BarPlot(frame.head(BARS), y_title=up),
        gr.ScatterPlot(dots, y_title=up, x_title=right),
        depths(records, choice.measure),
        table(records, choice.measure),
        origins(bench, choice, records),
    )


def build(bench: ResultFolder, page: gr.Blocks) -> None:
    """Lay the tab out in the page under construction."""
    if not bench.records:
        gr.HTML(origins(bench, Choice(""), ()), elem_id="mm-bench")
        return
    first = bench.suites[0]
    with gr.Row(elem_id="mm-filters"):
        suite = gr.Dropdown(bench.suites, value=first, label="Suite", min_width=140)
        labels = (*(name.capitalize() for name in FILTERS), "Measure", "Against", "Methods (none: all)")
        controls = [
            gr.Dropdown(label=label, min_width=160, multiselect=label.startswith("Methods"), **offered)
            for label, offered in zip(labels, _offered(bench, first), strict=True)
        ]
    coloured: dict[str, Any] = {"color": "kind", "color_map": COLOURS, "color_title": "", "height": 420}
    views: list[Any] = []
    with gr.Tab("Bars"):
        views.append(gr.BarPlot(x="method", y="value", x_title="", sort="-y", x_label_angle=-40,
                                tooltip="all", elem_id="mm-bars", **coloured))  # fmt: skip
    with gr.Tab("Two measures"):
        views.append(gr.ScatterPlot(x="against", y="value", tooltip="all", elem_id="mm-dots", **coloured))
    with gr.Tab("Acceptance by depth"):
        title = "share of the rounds in which at least so many drafted tokens were kept"
        views.append(gr.LinePlot(x="depth", y="kept", color="method", title=title, height=420, elem_id="mm-lines"))
    with gr.Tab("Table"):
        views.append(gr.Dataframe(interactive=False, wrap=True, pinned_columns=1, elem_id="mm-table"))
    views.append(gr.HTML("", elem_id="mm-bench"))
    chosen: list[Any] = [suite, *controls]

    def redraw(suite: str, *values: Any) -> tuple[Any, ...]:
        *filters, measure, across, methods = values
        known = bench.measures(suite)
        measure, across = (m if m in known else known[0] for m in (measure, across))
        return shown(bench, Choice(suite, measure, across, tuple(methods or ()), tuple(filters)))

    def other(suite: str) -> list[Any]:
        return [gr.update(**made) for made in _offered(bench, suite)]

    gr.on([c.input for c in controls], redraw, chosen, views, **QUICK)  # not .change: another suite changes them all
    suite.change(other, suite, controls, **QUICK).then(redraw, chosen, views, **QUICK)
    page.load(redraw, chosen, views, **QUICK)


def _offered(bench: ResultFolder, suite: str) -> list[dict[str, Any]]:
    """Choices and values of the controls after the suite, in their order."""
    offered: list[dict[str, Any]] = []
    for name, usual in zip(FILTERS, bench.usual(suite), strict=True):
        found = bench.choices(suite, name)
        offered.append({"choices": found, "value": usual, "visible": len(found) > 2})
    names = bench.measures(suite)
    measures = [(MEASURES[name][0], name) for name in names]
    second = next((n for n in ("tokens_per_target_call", "spent", "compression") if n in names), names[0])
    return [
        *offered,
        {"choices": measures, "value": names[0]},
        {"choices": measures, "value": second},
        {"choices": bench.choices(suite, "method")[1:], "value": []},
    ]
