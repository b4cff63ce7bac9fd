"""The Drafters tab: the bench's records, chosen by suite and filters, and where each number comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app.demo import plots
from mmspec.app.demo.plots import MEASURES
from mmspec.app.demo.tab import QUICK

ALL = "all"
FILTERS = ("model", "batch", "temperature", "prompt", "distribution")
BARS, SCATTER, DEPTHS, TABLE = VIEWS = ("bars", "two measures", "acceptance by depth", "table")
NONE = (
    '<p class="mm-hint">No measurements yet: there is no record in <code>{}</code>. <code>mmspec bench</code> writes '
    "them; start the demo with <code>--results FOLDER</code> to show those of another folder.</p>"
)


@dataclass(frozen=True)
class Choice:
    """What of the records is shown, and how."""

    suite: str
    view: str = BARS
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
        return [
            r
            for r in self.of(choice.suite)
            if all(str(_field(r, n)) == v for n, v in wanted)
            and (not choice.methods or str(r.get("method")) in choice.methods)
        ]


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


def draw(bench: ResultFolder, choice: Choice) -> str:
    """The records of a choice as plot or table, and their origin."""
    trouble = "".join(f'<p class="mm-badge mm-different">left out {escape(t)}</p>' for t in bench.trouble)
    if not bench.records:
        return trouble + NONE.format(escape(str(bench.folder)))
    records = bench.chosen(choice)[: plots.MOST]
    if not records:
        return trouble + '<p class="mm-hint">No record passes these filters. Set one of them back to “all”.</p>'
    shown = {
        BARS: lambda: plots.bars(records, choice.measure),
        SCATTER: lambda: plots.scatter(records, choice.across, choice.measure),
        DEPTHS: lambda: plots.depths(records, choice.measure),
        TABLE: lambda: plots.table(records, choice.measure),
    }[choice.view]()
    told = "" if choice.view == DEPTHS else _meaning(bench, choice)
    return trouble + shown + told + origins(bench, {r["file"] for r in records})


def _meaning(bench: ResultFolder, choice: Choice) -> str:
    """What the chosen measures are, in the words of the bench."""
    names = [choice.measure, *([choice.across] if choice.view == SCATTER else [])]
    said = [f"<b>{escape(MEASURES[n][0])}</b>: {escape(bench.meaning[n])}" for n in names if n in bench.meaning]
    return "".join(f'<p class="mm-small">{line}</p>' for line in said)


def origins(bench: ResultFolder, files: set[str]) -> str:
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


def build(bench: ResultFolder) -> None:
    """Lay the tab out in the page under construction."""
    if not bench.records:
        gr.HTML(draw(bench, Choice("")), elem_id="mm-bench")
        return
    first = Choice(bench.suites[0], filters=bench.usual(bench.suites[0]))
    with gr.Row(elem_id="mm-filters"):
        suite = gr.Dropdown(bench.suites, value=first.suite, label="Suite", min_width=140)
        controls = _controls(bench, first.suite)
    view = gr.Radio(list(VIEWS), value=BARS, show_label=False, container=False, elem_id="mm-show")
    shown = gr.HTML(draw(bench, first), elem_id="mm-bench")
    chosen: list[Any] = [suite, view, *controls]

    def redraw(suite: str, view: str, *values: Any) -> str:
        *filters, measure, across, methods = values
        known = bench.measures(suite)
        measure, across = (m if m in known else known[0] for m in (measure, across))
        return draw(bench, Choice(suite, view, measure, across, tuple(methods or ()), tuple(filters)))

    def other(suite: str) -> list[Any]:
        return [gr.update(**made) for made in _offered(bench, suite)]

    gr.on([c.input for c in chosen[1:]], redraw, chosen, shown, **QUICK)  # not .change: another suite changes them all
    suite.change(other, suite, controls, **QUICK).then(redraw, chosen, shown, **QUICK)
    view.change(lambda v: gr.update(interactive=v == SCATTER), view, controls[-2], **QUICK)


def _controls(bench: ResultFolder, suite: str) -> list[gr.Dropdown]:
    """Model and setting first, then what is shown of them."""
    labels = (*(name.capitalize() for name in FILTERS), "Measure", "Against", "Methods (none: all)")
    made = []
    for label, offered in zip(labels, _offered(bench, suite), strict=True):
        width = {"Measure": 270, "Against": 270}.get(label, 160)
        several = label.startswith("Methods")
        free = label != "Against"  # that only counts in one of the views
        made.append(gr.Dropdown(label=label, min_width=width, interactive=free, multiselect=several, **offered))
    return made


def _offered(bench: ResultFolder, suite: str) -> list[dict[str, Any]]:
    """Choices and values of the controls after the suite and the view, in their order."""
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
