"""The Drafters tab: the bench's records as bars and as a table, filtered, with where each number comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

FILTERS = ("suite", "method", "batch", "temperature")
MEASURES = {  # what the bars may show: (label, unit)
    "speedup_e2e": ("speed-up, end to end", "×"),
    "speedup_decode": ("speed-up, decoding only", "×"),
    "speedup_vs_best_stock": ("speed-up over the best stock path", "×"),
    "tokens_per_target_call": ("tokens_per_target_call", ""),
    "accepted_per_call": ("accepted_draft_tokens_per_call", ""),
    "tokens_per_s": ("tokens/s", ""),
    "ttft_ms": ("time to first token", " ms"),
    "peak_mb": ("peak memory", " MB"),
    "identical_rate": ("identical outputs", ""),
}
ALL = "all"
MOST = 400  # records drawn at once
NONE = (
    '<p class="mm-hint">No measurements yet: there is no record in <code>{}</code>. <code>mmspec bench</code> writes '
    "them; start the demo with <code>--results FOLDER</code> to show those of another folder.</p>"
)


@dataclass(frozen=True)
class Bench:
    """All records of a folder, and what the files say about themselves."""

    folder: Path
    records: list[dict[str, Any]]
    provenance: dict[str, dict[str, Any]]  # by file name
    trouble: list[str]  # files that could not be read

    def choices(self, name: str) -> list[str]:
        found = {record.get(name) for record in self.records} - {None}
        return [ALL, *map(str, sorted(found, key=lambda v: (isinstance(v, str), v)))]

    def chosen(self, values: tuple[str, ...]) -> list[dict[str, Any]]:
        """Records that agree with one value per filter."""
        wanted = [(name, value) for name, value in zip(FILTERS, values, strict=True) if value and value != ALL]
        return [r for r in self.records if all(str(r.get(name)) == value for name, value in wanted)]


def read(folder: Path) -> Bench:
    """The records of every *.json of a folder; a file that is none of the bench's is named, never fatal."""
    records: list[dict[str, Any]] = []
    provenance, trouble = {}, []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [dict(row, file=path.name) for row in content["records"]]
            provenance[path.name] = dict(content["provenance"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            trouble.append(f"{path.name}: {type(error).__name__}: {error}")
            continue
        records += rows
    return Bench(folder, records, provenance, trouble)


def draw(bench: Bench, measure: str, *values: str) -> str:
    """Bars, table and provenance of the records that pass the filters."""
    records = bench.chosen(values)[:MOST]
    trouble = "".join(f'<p class="mm-badge mm-different">left out {escape(t)}</p>' for t in bench.trouble)
    if not bench.records:
        return trouble + NONE.format(escape(str(bench.folder)))
    if not records:
        return trouble + '<p class="mm-hint">No record passes these filters. Set one of them back to “all”.</p>'
    return trouble + bars(records, measure) + table(records) + origins(bench, {r["file"] for r in records})


def bars(records: list[dict[str, Any]], measure: str) -> str:
    """One bar a record, longest first; a line marks 1× where the measure is a speed-up."""
    label, unit = MEASURES[measure]
    known = [(value, r) for r in records if isinstance(value := r.get(measure), (int, float))]
    if not known:
        return f'<p class="mm-hint">These records say nothing about {escape(label)}.</p>'
    most = max(max(value for value, _ in known), 1e-9)
    one = f' style="--one:{100 / most:.2f}%"' if unit == "×" and most >= 1 else ""
    lines = "".join(
        f'<li><span class="mm-who">{escape(_name(r))}</span><span class="mm-track"{one}>'
        f'<i style="--w:{max(100 * value / most, 0):.2f}%"></i></span><b>{_figure(value)}{unit}</b></li>'
        for value, r in sorted(known, key=lambda pair: -pair[0])
    )
    return f'<figure class="mm-bars"><figcaption>{escape(label)}</figcaption><ol>{lines}</ol></figure>'


def table(records: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record if name != "file"))
    head = "".join(f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_figure(record.get(name)))}</td>" for name in names) + "</tr>"
        for record in records
    )
    return (
        f'<div class="mm-table" tabindex="0" role="region" aria-label="records"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def origins(bench: Bench, files: set[str]) -> str:
    """Commit, device, versions, whatever the files say of how they were made."""
    parts = []
    for name in sorted(files):
        said = "".join(
            f"<div><dt>{escape(str(k))}</dt><dd>{escape(v if isinstance(v, str) else json.dumps(v))}</dd></div>"
            for k, v in bench.provenance[name].items()
        )
        parts.append(
            f'<details class="mm-origin"><summary>Where {escape(name)} comes from</summary><dl>{said}</dl></details>'
        )
    return "".join(parts)


def _name(record: dict[str, Any]) -> str:
    """What tells one record from another."""
    said = [str(record.get("method", "?")), str(record.get("suite", ""))]
    said += [f"batch {record['batch']}"] if "batch" in record else []
    said += [f"T {record['temperature']}"] if "temperature" in record else []
    said += [str(record["prompt"])] if record.get("prompt") else []
    return " · ".join(filter(None, said))


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def build(bench: Bench) -> None:
    """Lay the tab out in the page under construction."""
    start = next(iter(MEASURES))
    shown = gr.HTML(draw(bench, start, *[ALL] * len(FILTERS)), render=False, elem_id="mm-bench")
    if bench.records:
        with gr.Row(elem_id="mm-filters"):
            measures = [(label, name) for name, (label, _) in MEASURES.items()]
            chosen = [gr.Dropdown(measures, value=start, label="Bars show", min_width=200)]
            chosen += [gr.Dropdown(bench.choices(f), value=ALL, label=f.capitalize(), min_width=120) for f in FILTERS]

        def redraw(measure: str, *values: str) -> str:
            return draw(bench, measure, *values)

        gr.on(
            [c.change for c in chosen],
            redraw,
            chosen,
            shown,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
    shown.render()
