"""The Drafters tab: the bench's records of one run as bars and a table, with their provenance."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from mmspec.app.bench import report
from mmspec.app.demo.race_tab import QUICK

MEASURES = {  # fields of records → labels
    "speedup_e2e": "speed-up, end to end",
    "speedup_decode": "speed-up, decoding only",
    "speedup_vs_best_stock": "speed-up over the best stock path",
    "speedup_vs_best_plain": "speed-up over the best plain path",
    "tokens_per_target_call": "tokens per model call",
    "compression": "tokens per forward",
    "forwards": "forwards per picture",
    "c": "c: time of a round, in plain steps",
    "tokens_per_s": "tokens/s",
    "ttft_ms": "time to first token, ms",
    "seconds_per_image": "time of a picture, s",
    "peak_mb": "peak memory, MB",
    "identical_rate": "identical outputs",
    "fd_over_noise": "Fréchet distance to plain decoding, over noise",
    "fd_real": "Fréchet distance to real pictures",
    "faithfulness": "faithful to the prompt",
    "spent": "distortion per picture",
}
SETTINGS = {"batch": "batch {}", "rows": "{} rows", "context": "context {}", "temperature": "temperature {:g}",
            "prompt": "{} prompt"}  # these describe the condition of a record without a cell  # fmt: skip
MOST = 400  # maximum records of a table
BARS = 12
COLOURS = {"lossless": "#16a34a", "lossy": "#ea580c", "without mmspec": "#788496"}
NONE = (
    '<p class="mm-hint">No measurements yet: there are no records in <code>{}</code>. <code>mmspec bench</code> writes '
    "them; start the demo with <code>--results FOLDER</code> to show another folder.</p>"
)
Run = dict[str, Any]  # the file of a run: its `records` and their `provenance`


def read(folder: Path) -> dict[str, Run]:
    """The runs of a folder by title: the name of the file and the model."""
    runs = {}
    for path in sorted(folder.glob("*.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            run["records"] = [r for r in run.get("records", ()) if MEASURES.keys() & r]
            model = run.get("provenance", {}).get("model")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            print(f"mmspec demo: {path} has no records of mmspec bench ({error})", file=sys.stderr)
            continue
        if run["records"]:
            runs[path.stem.replace("-", " ") + (f", {model}" if model else "")] = run
    return runs


def first(runs: dict[str, Run], model: str) -> str:
    """The run to show first: the one that compares most methods, among those of the model if there are any."""
    own = [title for title, run in runs.items() if run["provenance"].get("model") == model] or list(runs)
    return max(own, key=lambda t: len({r.get("method") for r in runs[t]["records"] if not r.get("variant_of")}))


def kind(record: report.Record) -> str:
    """The category by which a bar is coloured."""
    if str(record.get("method", "")).split("-")[0] in ("stock", "ar", "hf"):
        return "without mmspec"
    return "lossless" if record.get("lossless", True) else "lossy"


def condition(record: report.Record) -> str:
    parts = [form.format(record[name]) for name, form in SETTINGS.items() if record.get(name) is not None]
    return str(record.get("cell") or ", ".join(parts) or "as it is")


def measures(records: Sequence[report.Record]) -> list[str]:
    """The measures for which records have numbers."""
    return [name for name in MEASURES if any(isinstance(record.get(name), (int, float)) for record in records)]


def table(records: Sequence[report.Record], measure: str) -> pd.DataFrame:
    """A table of all measures of the records; the chosen one is first, and sorted from high to low."""
    named = [measure, *(name for name in measures(records) if name != measure)]
    rows = [
        {"method": r.get("method"), "distribution": kind(r), **{name: r.get(name) for name in named}} for r in records
    ]
    frame = pd.DataFrame(rows).sort_values(measure, ascending=False, kind="stable").round(4)
    return frame.rename(columns=MEASURES)


def show(run: Run, condition_: str, measure: str) -> tuple[Any, ...]:
    """Bars of the best methods, a table of all of them, and what the measure means."""
    rows, label = table([r for r in run["records"] if condition(r) == condition_][:MOST], measure), MEASURES[measure]
    best = rows.rename(columns={label: "value"})[["method", "distribution", "value"]].dropna().head(BARS)
    title = f"{label[0].upper()}{label[1:]}; {condition_}"
    return gr.BarPlot(best, title=title), rows, report.meaning(run["records"]).get(measure, ""), run["provenance"]


def build(runs: dict[str, Run], folder: Path, model: str) -> None:
    """Build the tab in the current page; it opens with a run of this model."""
    if not runs:
        gr.HTML(NONE.format(folder))
        return
    with gr.Row():
        run = gr.Dropdown(list(runs), value=first(runs, model), label="Measurements")
        condition_, measure = gr.Dropdown(label="Condition"), gr.Dropdown(label="Measure")
    views = [
        gr.BarPlot(
            x="method", y="value", x_title=" ", y_title=" ", sort="-y", x_label_angle=-40, tooltip="all", height=380,
            color="distribution", color_map=COLOURS, color_title="", elem_id="mm-bars",
        ),
        gr.Dataframe(interactive=False, pinned_columns=1, show_search="filter", elem_id="mm-table"),
        gr.Markdown(),
    ]  # fmt: skip
    with gr.Accordion("Where this comes from", open=False):
        views.append(gr.JSON())

    def choose(title: str) -> tuple[Any, ...]:
        records = runs[title]["records"]
        there, named = list(dict.fromkeys(map(condition, records))), measures(records)
        labels = [(MEASURES[name], name) for name in named]
        selects = gr.Dropdown(there, value=there[0]), gr.Dropdown(labels, value=named[0])
        return *selects, *show(runs[title], there[0], named[0])

    def redraw(title: str, condition: str, measure: str) -> tuple[Any, ...]:
        return show(runs[title], condition, measure)

    gr.on(None, choose, run, [condition_, measure, *views], **QUICK)  # also when the page opens
    gr.on([condition_.input, measure.input], redraw, [run, condition_, measure], views, **QUICK)
