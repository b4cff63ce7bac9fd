"""The Drafters tab: the bench's records, a run at a time, as bars and as a table, and where each number comes from."""

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
SETTINGS = ("kernel", "batch", "rows", "context", "temperature", "prompt")  # that tell records of a run apart
USUAL = "vlm.json"  # the run that is shown first, where it is there
MOST = 400  # records of a table
BARS = 12
COLOURS = {"lossless": "#16a34a", "lossy": "#ea580c", "without mmspec": "#788496"}
NONE = (
    '<p class="mm-hint">No measurements yet: there is no record in <code>{}</code>. <code>mmspec bench</code> writes '
    "them; start the demo with <code>--results FOLDER</code> to show those of another folder.</p>"
)
Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ResultFolder:
    """The runs of a folder by the names of their files, each as the bench writes it.

    Attributes:
        trouble: files that could not be read.
    """

    folder: Path
    runs: dict[str, dict[str, Any]]
    trouble: list[str]

    @property
    def first(self) -> str:
        """The run that is shown first."""
        return USUAL if USUAL in self.runs else next(iter(self.runs))

    def records(self, run: str) -> Records:
        return list(self.runs[run]["records"])

    def measures(self, run: str) -> list[str]:
        """Those that a run has values of."""
        return [name for name in MEASURES if any(r.get(name) is not None for r in self.records(run))]


def read(folder: Path) -> ResultFolder:
    """The records of every *.json of a folder; a file that is none of the bench's is named, never fatal."""
    found = ResultFolder(folder, {}, [])
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [dict(row) for row in content.get("records", ()) if MEASURES.keys() & row]
            told = {name: dict(content.get(name, {})) for name in ("provenance", "meaning")}
        except (OSError, ValueError, TypeError, AttributeError):
            found.trouble.append(f"{path.name}: it holds no records of mmspec bench")
            continue
        if rows:
            found.runs[path.name] = {"records": rows, **told}
    return found


def kind(record: dict[str, Any]) -> str:
    """What a bar or dot is coloured by."""
    if str(record.get("method", "")).split("-")[0] in ("stock", "ar", "hf"):
        return "without mmspec"
    return "lossless" if record.get("lossless", True) else "lossy"


def named(records: Records) -> list[str]:
    """The records' methods, with whatever else tells them apart."""
    telling = [name for name in SETTINGS if len({str(r.get(name)) for r in records}) > 1]
    words = {"batch": "batch {}", "rows": "{} rows", "context": "context {}", "temperature": "T {}"}
    said = [[words.get(t, "{}").format(r[t]) for t in telling if r.get(t) is not None] for r in records]
    return [" · ".join([str(r.get("method", "?")), *rest]) for r, rest in zip(records, said, strict=True)]


def value(record: dict[str, Any], name: str) -> float:
    """A measure of a record; NaN where it has none."""
    found = record.get(name)
    return float(found) if isinstance(found, (int, float)) else math.nan


def ranked(records: Records, measure: str) -> pd.DataFrame:
    """A row a record, the most of the measure first: who it is, its kind, the measure and its quartiles."""
    frame = pd.DataFrame({
        "method": named(records), "kind": list(map(kind, records)), "value": [value(r, measure) for r in records],
        "lower quartile": [value(r, f"{measure}_p25") for r in records],
        "upper quartile": [value(r, f"{measure}_p75") for r in records],
    })  # fmt: skip
    return frame[frame["value"].notna()].sort_values("value", ascending=False, kind="stable")


def table(records: Records, measure: str) -> pd.DataFrame:
    """All measures that the records hold; the most of the chosen one first."""
    shown = [name for name in MEASURES if any(math.isfinite(value(r, name)) for r in records)]
    told = [name for name in (*SETTINGS, "setting", "n") if any(r.get(name) not in (None, "") for r in records)]
    ordered = sorted(records, key=lambda r: -value(r, measure) if math.isfinite(value(r, measure)) else math.inf)
    rows = [{"method": str(r.get("method", "?")), "distribution": kind(r), **{name: r.get(name) for name in told},
             **{MEASURES[name][0]: round(value(r, name), 4) for name in shown}} for r in ordered]  # fmt: skip
    return pd.DataFrame(rows)


def origins(bench: ResultFolder, run: str, measure: str) -> str:
    """What the measure means; commit, device, versions, whatever the file says of how it was made."""
    parts = [f'<p class="mm-badge mm-different">left out {escape(t)}</p>' for t in bench.trouble]
    if not bench.runs:
        return "".join([*parts, NONE.format(escape(str(bench.folder)))])
    told = bench.runs[run]
    if measure in told["meaning"]:
        said = f"<b>{escape(MEASURES[measure][0])}</b>: {escape(str(told['meaning'][measure]))}"
        parts.append(f'<p class="mm-small">{said}</p>')
    rows = "".join(
        f"<div><dt>{escape(str(k))}</dt><dd>{escape(v if isinstance(v, str) else json.dumps(v))}</dd></div>"
        for k, v in told["provenance"].items()
    )
    summary = f"<summary>Where {escape(run)} comes from</summary>"
    return "".join([*parts, f'<details class="mm-origin">{summary}<dl>{rows}</dl></details>'])


def shown(bench: ResultFolder, run: str, measure: str) -> tuple[Any, ...]:
    """What the bars, the table and the notes show of a run."""
    records, (label, unit) = bench.records(run)[:MOST], MEASURES[measure]
    title = f"{label}{unit and f' in{unit}' if unit != '×' else ' (×)'}"
    bars = gr.BarPlot(ranked(records, measure).head(BARS), y_title=title)
    return bars, table(records, measure), origins(bench, run, measure)


def build(bench: ResultFolder, page: gr.Blocks) -> None:
    """Lay the tab out in the page under construction."""
    if not bench.runs:
        gr.HTML(origins(bench, "", ""), elem_id="mm-bench")
        return
    with gr.Row(elem_id="mm-filters"):
        run = gr.Dropdown([(Path(name).stem, name) for name in bench.runs], value=bench.first, label="Run")
        measure = gr.Dropdown(**_measures(bench, bench.first), label="Measure")
    coloured: dict[str, Any] = {"color": "kind", "color_map": COLOURS, "color_title": "", "height": 420}
    views: list[Any] = [
        gr.BarPlot(x="method", y="value", x_title="", sort="-y", x_label_angle=-40, tooltip="all", elem_id="mm-bars",
                   **coloured),
        gr.Dataframe(interactive=False, wrap=True, pinned_columns=1, show_search="filter", elem_id="mm-table"),
        gr.HTML("", elem_id="mm-bench"),
    ]  # fmt: skip

    def redraw(run: str, measure: str) -> tuple[Any, ...]:
        known = bench.measures(run)
        return shown(bench, run, measure if measure in known else known[0])

    measure.input(redraw, [run, measure], views, **QUICK)  # not .change: another run changes it
    run.change(lambda run: gr.update(**_measures(bench, run)), run, measure, **QUICK).then(
        redraw, [run, measure], views, **QUICK
    )
    page.load(redraw, [run, measure], views, **QUICK)


def _measures(bench: ResultFolder, run: str) -> dict[str, Any]:
    """Choices and value of the control."""
    names = bench.measures(run)
    return {"choices": [(MEASURES[name][0], name) for name in names], "value": names[0]}
