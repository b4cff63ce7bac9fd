"""The vlm suite, extended by pairs of pictures, clips, published benchmarks and tuning."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.suites import drawn, published
from benchmarks.suites.subject import refuse
from mmspec.app.bench import questions, report, vlm
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import Outcome, batches, say
from mmspec.app.bench.questions import Questions
from mmspec.app.bench.report import Record
from mmspec.app.bench.vlm import VlmCell, calling, single
from mmspec.app.compare import Comparison, Method
from mmspec.app.options import count
from mmspec.pipelines.prompts import text_alone

questions.FINDERS.append(published.find)
questions.NAMES.extend(published.PROTOCOLS)
report.SUMMARIES.append(published.data_tables)

GRIDS: dict[str, tuple[dict[str, int], ...]] = {  # the settings that --tune tries
    "hf-prompt-lookup": tuple({"prompt_lookup_num_tokens": k} for k in (3, 5, 10)),
    "ngram": tuple({"depth": d} for d in (3, 5, 8)),
    "drafter": (
        *({"depth": d, "width": 1} for d in range(3, 11)),
        {"depth": 3, "width": 2, "size": 8},
        {"depth": 5, "width": 2, "size": 12},
        {"depth": 5, "width": 4, "size": 16},
        {"depth": 7, "width": 4, "size": 24},
        {"depth": 6, "width": 8, "size": 40},
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    vlm.configure(parser)
    drawn.configure(parser)
    add = parser.add_argument
    add("--tune", action="store_true", help="choose each method's depth and tree on other images first")
    add("--tune-images", type=count, default=4, help="number of these images (default: %(default)s)")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    if not args.tune:
        refuse(args, "nothing is tuned without --tune", tune_images=4)

    def settle(bench: VlmBench, chosen: list[Method], cell: VlmCell) -> list[Method]:
        if not args.tune:
            return chosen
        others = drawn.asked(args, not text_alone(bench.processor), args.tune_images)
        outcome.tuned[str(cell)] = best = tune(bench, chosen, cell, others)
        return [tuned(m, best[m.name]["chosen"]) if m.name in best else m for m in chosen]

    yield from vlm.measure(args, outcome, drawn.asked, settle)


def tuned(method: Method, setting: dict[str, int]) -> Method:
    if method.drafter is None:
        return replace(method, arguments={**method.arguments, **setting})
    return replace(method, options={**method.options, **setting})


def tune(bench: VlmBench, chosen: list[Method], cell: VlmCell, asked: Questions) -> Record:
    """For each method with a grid, the setting with the least time per token, and all settings tried."""
    tried: dict[str, tuple[str, dict[str, int]]] = {}
    ways = []
    for method in chosen:
        grid = GRIDS.get(method.name, () if method.drafter is None else GRIDS["drafter"])
        for setting in grid if cell.batch == 1 or not single(method) else ():
            title = f"{method.name} {setting}"
            tried[title] = method.name, setting
            ways.append(replace(tuned(method, setting), name=title))
    groups = [group for some in asked.values() for group in batches(some, cell.batch)]
    comparison = Comparison(ways, calling(bench, cell))
    comparison.warm_up((bench.inputs(groups[0]), bench.seed))  # leaves out settings that a drafter does not take
    best: Record = {}
    requests = ((bench.inputs(group), bench.seed + turn) for turn, group in enumerate(groups, 1))
    for title, calls in comparison.measure(requests).items():
        name, setting = tried[title]
        cost = 1e3 * sum(c.seconds for c in calls) / sum(c.tokens for c in calls)
        best.setdefault(name, {"tried": []})["tried"].append({"setting": setting, "ms_per_token": cost})
    for name, entry in best.items():
        entry["chosen"] = min(entry["tried"], key=lambda one: one["ms_per_token"])["setting"]
        say(f"tuned {cell}: {name} {entry['chosen']}")
    return best
