"""The vlm suite: stock paths and drafters answer the same questions in turn, and each call is timed."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from mmspec.app import embedded
from mmspec.app.bench import report, vlm_methods, vlm_shown
from mmspec.app.bench.answers import TimedCall, VlmBench
from mmspec.app.bench.command import BenchError, Outcome, batches, say
from mmspec.app.bench.questions import Question
from mmspec.app.bench.vlm_methods import GRIDS, VlmMethod, methods
from mmspec.app.bench.vlm_shown import Questions, Shown, questions
from mmspec.app.compare import Comparison
from mmspec.app.embedded import STOCK
from mmspec.app.engine import load
from mmspec.app.options import count, from_zero, where
from mmspec.app.provenance import provenance
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel
from mmspec.pipelines.prompts import text_alone

SINGLE = "not measured: transformers refuses assisted decoding at batch > 1"
SWITCHED = "; a name with a comma is the same drafter with one of its parts switched off while it drafts"
Request = tuple[BatchFeature, int]  # model inputs, and a seed


@dataclass(frozen=True)
class VlmCell:
    """One condition under which all methods are compared."""

    batch: int
    temperature: float
    shown: Shown | None = None  # None: all questions

    def __str__(self) -> str:
        what = f", {self.shown}" if self.shown else ""
        return f"batch {self.batch}, temperature {self.temperature:g}{what}"


def configure(parser: argparse.ArgumentParser) -> None:
    conditions(parser, [1, 4], [0.0, 1.0], 256)
    parser.add_argument("--all-turns", action="store_true", help="ask all turns of a conversation, not only the first, "
        "with the model's own greedy answers in between")  # fmt: skip


def conditions(parser: argparse.ArgumentParser, batch: list[int], temperature: list[float], tokens: int) -> None:
    """Add the options for model, drafters, questions and settings; the last three arguments are defaults."""
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or an embedded one: %(default)s, "
        "scenes-hybrid")  # fmt: skip
    vlm_methods.configure(parser)
    vlm_shown.configure(parser)
    add("--batch", type=count, nargs="+", default=batch)
    add("--temperature", type=from_zero, nargs="+", default=temperature)
    add("--max-new-tokens", type=count, default=tokens)
    where(parser)


def measure(
    args: argparse.Namespace,
    outcome: Outcome,
    methods: Callable[[GenerativeModel, argparse.Namespace], list[VlmMethod]] = methods,
    questions: Callable[[argparse.Namespace, bool], tuple[Questions, Questions]] = questions,
) -> Iterator[None]:
    """Measure all cells in turn; yields whenever the outcome has new records."""
    engine = load(args.model, STOCK, args.device, args.dtype, args.max_new_tokens, 0)
    bench = VlmBench(engine.model, engine.processor, args.max_new_tokens, args.seed)
    chosen = methods(bench.model, args)
    outcome.provenance = provenance(bench.model.device, bench.model.dtype) | {"model": args.model}
    outcome.provenance |= {"data": [*map(str, args.data)]} if args.data else {}
    asked, others = questions(args, not text_alone(bench.processor))
    if args.all_turns:
        if not any(q.later for some in asked.values() for q in some):
            raise BenchError("--all-turns: no question has a second turn; leave it out")
        asked, others = ({shown: bench.conversations(some) for shown, some in each.items()} for each in (asked, others))
    best: report.Record = {}
    for batch, heat in [(batch, heat) for batch in args.batch for heat in args.temperature]:
        if args.tune:
            best = tune(bench, chosen, VlmCell(batch, heat), others)
            outcome.tuned[str(VlmCell(batch, heat))] = best
            yield
        ready = [m.tuned(best[m.name]["chosen"]) if m.name in best else m for m in chosen]
        for shown, some in asked.items():
            cell = VlmCell(batch, heat, shown)
            records = measure_cell(bench, cell, ready, some)
            outcome.records += records
            speeds = [f"{r['method']} {r['speedup_e2e']:.2f}x" for r in records if r["n"] and r["category"] == "all"]
            say(f"{cell}: {'; '.join(speeds)}")
            yield


def tune(bench: VlmBench, chosen: list[VlmMethod], cell: VlmCell, asked: Questions) -> report.Record:
    """For each method with a grid, the setting with the least time per token, and all settings that were tried."""
    tried = {f"{m.name} {setting}": (m.name, setting, m.tuned(setting))
             for m in chosen for setting in GRIDS.get(m.grid, ())
             if (cell.batch == 1 or not m.single) and bench.takes(m.tuned(setting))}  # fmt: skip
    groups = [group for some in asked.values() for group in batches(some, cell.batch)]
    comparison = Comparison([replace(method, name=name) for name, (*_, method) in tried.items()], calling(bench, cell))
    requests = ((bench.inputs(group), bench.seed + turn) for turn, group in enumerate([groups[0], *groups]))
    best: report.Record = {}
    for title, (_, *calls) in comparison.measure(requests).items():  # the first turn warms up
        name, setting, _ = tried[title]
        cost = 1e3 * sum(c.seconds for c in calls) / sum(c.tokens for c in calls)
        best.setdefault(name, {"tried": []})["tried"].append({"setting": setting, "ms_per_token": cost})
    for name, entry in best.items():
        entry["chosen"] = min(entry["tried"], key=lambda one: one["ms_per_token"])["setting"]
        say(f"tuned {cell}: {name} {entry['chosen']}")
    return best


def calling(bench: VlmBench, cell: VlmCell) -> Callable[[VlmMethod, Request], TimedCall]:
    return lambda method, request: bench.call(method, cell.temperature, *request)


def measure_cell(bench: VlmBench, cell: VlmCell, chosen: list[VlmMethod], some: list[Question]) -> list[report.Record]:
    """Warm each method up, measure its memory, then time all of them in turn on each batch."""
    groups, seen = batches(some, cell.batch), list[float]()
    torch.compiler.reset()  # code compiled for other lengths counts toward the recompilation limit
    longest = bench.inputs(max(groups, key=lambda group: max(len(q.prompt) for q in group)))
    comparison = Comparison([m for m in chosen if cell.batch == 1 or not m.single], calling(bench, cell))
    comparison.warm_up((longest, bench.seed), ["stock"], bench.model.device)

    def requests() -> Iterator[Request]:
        for turn, group in enumerate(groups):
            inputs = bench.inputs(group)
            seen.append(bench.visual_tokens(inputs))
            yield inputs, bench.seed + turn

    comparison.measure(requests())
    comparison.notes |= {m.name: SINGLE for m in chosen if cell.batch > 1 and m.single}
    return [record | {"visual_tokens": statistics.fmean(seen)} for record in _records(cell, chosen, groups, comparison)]


def _records(
    cell: VlmCell, chosen: list[VlmMethod], groups: list[list[Question]], comparison: Comparison
) -> list[report.Record]:
    """One record per method, and at batch 1 one more for each category of questions."""
    title = str(cell) + (SWITCHED if any(m.of for m in chosen) else "")
    turns: dict[str, list[int]] = {"all": list(range(len(groups)))}
    for turn, group in enumerate(groups if cell.batch == 1 else ()):
        if group[0].category != "all":
            turns.setdefault(group[0].category, []).append(turn)
    records = []
    for category, places in turns.items():
        calls = {name: [runs[place] for place in places] for name, runs in comparison.results.items()}
        best = report.fastest(calls)
        slower = {name: f"slower than {best} here" for name in report.STOCK_PATHS if name in calls and name != best}
        for method in chosen:
            if method.name in calls or category == "all":
                facts = {"suite": "vlm", "cell": title, "method": method.name, "variant_of": method.of,
                         "batch": cell.batch, "temperature": cell.temperature, **asdict(cell.shown or Shown()),
                         "category": category, "setting": method.setting,
                         "refused": method.single and cell.batch > 1}  # fmt: skip
                figures = report.figures(method.name, calls, best, greedy=cell.temperature == 0, assisted=method.single)
                note = comparison.notes.get(method.name, slower.get(method.name, ""))
                records.append(facts | figures | {"peak_mb": comparison.peaks.get(method.name), "note": note})
    return records
