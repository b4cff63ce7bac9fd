"""The vlm suite, extended by pairs of pictures, clips, ablations of drafters, and curves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.suites import ablations, curves, drawn, plots, published, tuning
from benchmarks.suites.subject import refuse
from mmspec.app.bench import questions, report, vlm
from mmspec.app.bench.answers import VlmBench
from mmspec.app.bench.command import Outcome
from mmspec.app.bench.vlm import VlmCell
from mmspec.app.compare import Method
from mmspec.app.options import count
from mmspec.pipelines.prompts import text_alone

questions.FINDERS.append(published.find)
questions.NAMES.extend(published.NAMES)
report.SUMMARIES.append(published.data_tables)


def configure(parser: argparse.ArgumentParser) -> None:
    vlm.configure(parser)
    ablations.configure(parser)
    drawn.configure(parser)
    add = parser.add_argument
    add("--tune", action="store_true", help="choose each method's depth and tree on other images first")
    add("--tune-images", type=count, default=4, help="number of these images (default: %(default)s)")
    add("--curves", type=Path, metavar="FILE", help="tokens per call by depth, and speed-up by visual "
        "tokens, as .png, .svg or .pdf (needs matplotlib)")  # fmt: skip


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    if args.curves:
        plots.check_plot(args.curves)
    if not args.tune:
        refuse(args, "nothing is tuned without --tune", tune_images=4)

    def tuned(bench: VlmBench, chosen: list[Method], cell: VlmCell) -> list[Method]:
        if not args.tune:
            return chosen
        others = drawn.asked(args, not text_alone(bench.processor), args.tune_images)
        outcome.tuned[str(cell)] = best = tuning.tune(bench, chosen, cell, others)
        return [tuning.tuned(m, best[m.name]["chosen"]) if m.name in best else m for m in chosen]

    yield from vlm.measure(args, outcome, ablations.methods, drawn.asked, tuned)
    if args.curves:
        curves.draw(outcome.records, args.curves, f"{args.model} on {outcome.provenance['device']}")
