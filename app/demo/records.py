"""The Drafters tab: the bench's records of one run as bars and a table, with their provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from mmspec.app.bench import report
from mmspec.app.demo.tab import QUICK

MEASURES = {  # fields of records → labels
    "speedup_e2e": "speed-up, end to end",
    "speedup_decode": "speed-up, decoding only",
    "speedup_vs_best_stock": "speed-up over the best stock path",
    "speedup_vs_best_plain": "speed-up over the best plain path",
    "tokens_per_target_call": "tokens per model call",
    "accepted_per_call": "drafted tokens accepted per call",
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
    "precision": "precision",
    "recall": "recall",
    "faithfulness": "faithful to the prompt",
    "spent": "distortion per picture",
    "spent_per_token": "distortion per token",
}
SUITES = {  # suites of the bench → titles
    "vlm": "Answers about pictures",
    "caption": "Captions of many pictures",
    "turns": "Conversations about pictures",
    "image": "Pictures from prompts",
    "image-quality": "How good pictures from prompts are",
    "mar": "Pictures of continuous tokens",
    "mar-quality": "How good pictures of continuous tokens are",
    "round": "Where the time of a round goes",
    "shapes": "Shapes of published models",
    "kernels": "Kernels",
}
SETTINGS = {"batch": "batch {}", "rows": "{} rows", "context": "context {}", "temperature": "temperature {:g}",
            "prompt": "{} prompt"}  # these describe the condition of a record without a cell  # fmt: skip
QUARTILES = {"p25": "lower quartile", "p75": "upper quartile"}
MOST = 400  # maximum records of a table
BARS = 12
COLOURS = {"lossless": "#16a34a", "lossy": "#ea580c", "without mmspec": "#788496"}
NONE = (
    '<p class="mm-hint">No measurements yet: there are no records in <code>{}</code>. <code>mmspec bench</code> writes '
    "them; start the demo with <code>--results FOLDER</code> to show another folder.</p>"
)
Record = dict[str, Any]
Records = Sequence[Record]


@dataclass(frozen=True)
class ResultFolder:
    """The runs of a folder by file name, in the bench's format.

    Attributes:
        trouble: files that could not be read.
    """

    folder: Path
    runs: dict[str, dict[str, Any]]
    trouble: list[str]

    def first(self, model: str) -> str:
        """The run to show first: the one that compares most methods, among those of the model if there are any."""
        own = [name for name, run in self.runs.items() if run["provenance"].get("model") == model] or list(self.runs)
        methods = {
            name: {r.get("method") for r in self.runs[name]["records"] if not r.get("variant_of")} for name in own
        }
        return max(own, key=lambda name: len(methods[name]))

    def title(self, run: str) -> str:
        """The title of a run: its suite, its model, and other words of its file name."""
        about = str(self.runs[run]["records"][0].get("suite"))
        model = str(self.runs[run]["provenance"].get("model", ""))
        known = {*about.split("-"), *model.split("-")}
        rest = ", ".join(word for word in Path(run).stem.split("-") if word not in known)
        return SUITES.get(about, "Measurements") + f", {model}" * bool(model) + f": {rest}" * bool(rest)

    def conditions(self, run: str) -> dict[str, Records]:
        """The records of a run by their conditions."""
        records: dict[str, list[Record]] = {}
        for record in self.runs[run]["records"]:
            records.setdefault(condition(record), []).append(record)
        return dict(records)

    def quality(self, suite: str, model: str) -> dict[str, Record]:
        """The records of a suite on a model, by method."""
        runs = [run["records"] for run in self.runs.values() if run["provenance"].get("model") == model]
        return {r["method"]: r for rows in runs for r in rows if r.get("suite") == suite}


def read(folder: Path) -> ResultFolder:
    """Read the records of all *.json files of a folder; files that the bench did not write are listed in `trouble`."""
    bench = ResultFolder(folder, {}, [])
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [dict(row) for row in content.get("records", ()) if MEASURES.keys() & row]
            provenance = dict(content.get("provenance", {}))
        except (OSError, ValueError, TypeError, AttributeError):
            bench.trouble.append(f"{path.name}: it has no records of mmspec bench")
            continue
        if rows:
            bench.runs[path.name] = {"records": rows, "provenance": provenance}
    return bench


def kind(record: dict[str, Any]) -> str:
    """The category by which a bar is coloured."""
    if str(record.get("method", "")).split("-")[0] in ("stock", "ar", "hf"):
        return "without mmspec"
    return "lossless" if record.get("lossless", True) else "lossy"


def condition(record: Record) -> str:
    parts = [form.format(record[name]) for name, form in SETTINGS.items() if record.get(name) is not None]
    return str(record.get("cell") or ", ".join(parts) or "as it is")


def measures(records: Records) -> list[str]:
    """The measures for which records have numbers."""
    return [name for name in MEASURES if any(isinstance(record.get(name), (int, float)) for record in records)]


def table(records: Records, measure: str) -> pd.DataFrame:
    """A table of all measures of the records; the chosen one is first, with quartiles, and sorted from high to low."""
    named = {measure: MEASURES[measure], **{f"{measure}_{at}": name for at, name in QUARTILES.items()}}
    named |= {name: MEASURES[name] for name in measures(records) if name != measure}
    columns = {"method": "method", "distribution": "distribution", "setting": "setting", "n": "n"} | named
    frame = pd.DataFrame([{**r, "distribution": kind(r)} for r in records]).reindex(columns=list(columns))
    frame[list(named)] = frame[list(named)].apply(pd.to_numeric, errors="coerce").round(4)
    frame = frame.sort_values(measure, ascending=False, kind="stable").rename(columns=columns)
    return frame.drop(columns=[c for c in frame if frame[c].isna().all() and c != named[measure]])


def origins(bench: ResultFolder, run: str, measure: str) -> str:
    """HTML with the meaning of the measure and the provenance of the run."""
    parts = [f'<p class="mm-badge mm-different">left out {escape(t)}</p>' for t in bench.trouble]
    if not bench.runs:
        return "".join([*parts, NONE.format(escape(str(bench.folder)))])
    facts = bench.runs[run]
    if text := report.meaning(facts["records"]).get(measure):
        meaning = f"<b>{escape(MEASURES[measure])}</b>: {escape(text)}"
        parts.append(f'<p class="mm-small">{meaning}</p>')
    rows = "".join(
        f"<div><dt>{escape(str(k))}</dt><dd>{escape(v if isinstance(v, str) else json.dumps(v))}</dd></div>"
        for k, v in {"file": run, **facts["provenance"]}.items()
    )
    summary = "<summary>Where this comes from</summary>"
    return "".join([*parts, f'<details class="mm-origin">{summary}<dl>{rows}</dl></details>'])


def shown(bench: ResultFolder, run: str, condition_: str, measure: str) -> tuple[object, ...]:
    rows, label = table(bench.conditions(run)[condition_][:MOST], measure), MEASURES[measure]
    title = f"{label[0].upper()}{label[1:]}; {condition_}"
    best = rows.rename(columns={label: "value"}).filter(["method", "distribution", "value", *QUARTILES.values()])
    return gr.BarPlot(best[best["value"].notna()].head(BARS), title=title), rows, origins(bench, run, measure)


def build(bench: ResultFolder, model: str, page: gr.Blocks) -> None:
    """Build the tab in the current page; it opens with a run of this model."""
    if not bench.runs:
        gr.HTML(origins(bench, "", ""), elem_id="mm-bench")
        return
    first = bench.first(model)
    with gr.Row():
        run = gr.Dropdown([(bench.title(name), name) for name in bench.runs], value=first, label="Measurements")
        condition_, measure = gr.Dropdown(label="Condition"), gr.Dropdown(label="Measure")
    coloured: dict[str, Any] = {"color": "distribution", "color_map": COLOURS, "color_title": "", "height": 380}
    views: list[Any] = [
        gr.BarPlot(x="method", y="value", x_title=" ", y_title=" ", sort="-y", x_label_angle=-40, tooltip="all",
                   elem_id="mm-bars", **coloured),
        gr.Dataframe(interactive=False, pinned_columns=1, show_search="filter", elem_id="mm-table"),
        gr.HTML("", elem_id="mm-bench"),
    ]  # fmt: skip

    def choices(run: str) -> tuple[Any, Any]:
        there = bench.conditions(run)
        named = measures(bench.runs[run]["records"])
        labels = [(MEASURES[name], name) for name in named]
        return gr.update(choices=list(there), value=next(iter(there))), gr.update(choices=labels, value=named[0])

    def redraw(run: str, condition_: str, measure: str) -> tuple[object, ...]:
        return shown(bench, run, condition_, measure)

    for chosen in (page.load, run.input):
        chosen(choices, run, [condition_, measure], **QUICK).then(redraw, [run, condition_, measure], views, **QUICK)
    gr.on([condition_.input, measure.input], redraw, [run, condition_, measure], views, **QUICK)
