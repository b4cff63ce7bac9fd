"""The vlm suite, also with pairs and clips, with drafters that lack a part, and with curves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.suites import ablations, curves, drawn, plots
from mmspec.app.bench import vlm
from mmspec.app.bench.command import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    vlm.configure(parser)
    ablations.configure(parser)
    drawn.configure(parser)
    parser.add_argument("--curves", type=Path, metavar="FILE", help="tokens per call by depth, and speed-up by visual "
        "tokens, as .png, .svg or .pdf (needs matplotlib)")  # fmt: skip


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    if args.curves:
        plots.check_plot(args.curves)
    yield from vlm.measure(args, outcome, ablations.methods, drawn.asked)
    if args.curves:
        curves.draw(outcome.records, args.curves, f"{args.model} on {outcome.provenance['device']}")
