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
BARS = 12
COLOURS = {"lossless": "#16a34a", "lossy": "#ea580c", "without mmspec": "#788496"}
NONE = '<p class="mm-hint">There are no records of <code>mmspec bench</code> in <code>{}</code>; see --results.</p>'
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


def show(run: Run, chosen: str, measure: str) -> tuple[Any, ...]:
    """Bars of a condition's best methods, a table of all methods, what the measure means, and the provenance."""
    records = [record for record in run["records"] if condition(record) == chosen]
    named = [measure, *(name for name in measures(records) if name != measure)]
    rows = pd.DataFrame(
        {"method": r.get("method"), "distribution": kind(r), **{name: r.get(name) for name in named}} for r in records
    )
    rows = rows.sort_values(measure, ascending=False, kind="stable").round(4)
    best = rows.rename(columns={measure: "value"})[["method", "distribution", "value"]].dropna().head(BARS)
    title = f"{MEASURES[measure][0].upper()}{MEASURES[measure][1:]}; {chosen}"
    meaning = report.meaning(run["records"]).get(measure, "")
    return gr.BarPlot(best, title=title), rows.rename(columns=MEASURES), meaning, run["provenance"]


def build(runs: dict[str, Run], folder: Path, model: str) -> None:
    """Build the tab in the current page; it opens with a run of this model."""
    if not runs:
        gr.HTML(NONE.format(folder))
        return
    with gr.Row():
        run = gr.Dropdown(list(runs), value=first(runs, model), label="Measurements")
        chosen, measure = gr.Dropdown(label="Condition"), gr.Dropdown(label="Measure")
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
        conditions, named = list(dict.fromkeys(map(condition, records))), measures(records)
        labels = [(MEASURES[name], name) for name in named]
        selects = gr.Dropdown(conditions, value=conditions[0]), gr.Dropdown(labels, value=named[0])
        return *selects, *show(runs[title], conditions[0], named[0])

    gr.on(None, choose, run, [chosen, measure, *views], **QUICK)  # also when the page opens
    changed = [chosen.input, measure.input]
    gr.on(changed, lambda title, *values: show(runs[title], *values), [run, chosen, measure], views, **QUICK)
