"""The vlm suite, also with pairs and clips, with drafters that lack a part, and with curves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.suites import ablations, curves, drawn
from mmspec.app.bench import vlm
from mmspec.app.bench.command import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    """As of `mmspec bench vlm`, and what is further shown, measured and drawn."""
    vlm.configure(parser)
    ablations.configure(parser)
    drawn.configure(parser)
    curves.configure(parser, "tokens per call by depth, and speed-up by visual tokens")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """All cells, one after the other; yields whenever the outcome has grown."""
    curves.check(args.curves)
    yield from vlm.measure(args, outcome, ablations.methods, drawn.questions)
    if args.curves:
        curves.draw(outcome.records, args.curves, f"{args.model} on {outcome.provenance['device']}")
