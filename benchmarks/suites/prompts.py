"""The prompts suite: several prompts per picture in one run, compared with a run for each prompt."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

import mmspec
from benchmarks.suites import subject
from mmspec.app.bench import report
from mmspec.app.bench.caption import HELD_OUT
from mmspec.app.bench.command import Outcome, say
from mmspec.app.bench.questions import pictures_of
from mmspec.app.caption.options import KEPT
from mmspec.app.compare import Comparison, Method, over
from mmspec.app.devices import wait
from mmspec.app.engine import Engine
from mmspec.app.options import count
from mmspec.app.prompt import PromptChoice

PROMPTS = ("Describe this image in two or three sentences.", "How many objects are there?", "What is in this image?")
BASE = "a run for each prompt"


@dataclass(frozen=True)
class PromptsRun:
    """A pass over all pictures: wall time, answers by picture, the share of prompt tokens from the prefix cache."""

    seconds: float
    answers: list[tuple[str, ...]]
    reused: float


def configure(parser: argparse.ArgumentParser) -> None:
    subject.configure(parser, 128)
    add = parser.add_argument
    add("--prompt", nargs="+", default=list(PROMPTS), help="the prompts about each picture")
    add("--images", type=count, default=24, help="pictures (default: %(default)s)")
    add("--rows", type=count, nargs="+", default=[1, 4, 8], help="batch sizes (default: 1 4 8)")
    add("--turns", type=count, default=5, help="timed runs per method (default: %(default)s)")
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    drafter = subject.named(args)
    engine = subject.loaded(args, outcome, drafter, drafter=drafter)
    pictures = [list(question.images) for question in pictures_of(args, HELD_OUT, args.images)]
    sides = [Method(BASE), Method("one run", options={"prefix_cache": KEPT}), Method("one run, nothing kept")]
    for rows in args.rows:

        def run(side: Method, shown: list[list[Image.Image]], rows: int = rows) -> PromptsRun:
            mmspec.enable(engine.model, drafter=engine.drafter, **{"prefix_cache": None, **side.options})
            asked = [[prompt] for prompt in args.prompt] if side.name == BASE else [args.prompt]
            return _run(engine, shown, asked, rows)

        comparison = Comparison(sides, run)
        comparison.warm_up(pictures[: rows + 2], [BASE])
        made = comparison.measure([pictures] * args.turns)
        for side in comparison.able:
            captions = len(args.prompt) * len(pictures)
            outcome.records.append(record(side.name, rows, captions, made[side.name], made[BASE]))
            say(f"{rows} at once: {side.name} {outcome.records[-1]['seconds']:.1f} s")
        yield


def _run(engine: Engine, shown: list[list[Image.Image]], asked: list[list[str]], rows: int) -> PromptsRun:
    """A pass for each list of prompts; the time includes the processor's work."""
    answers: list[tuple[str, ...]] = [()] * len(shown)
    reused = tokens = 0.0
    wait(engine.model.device)
    began = time.perf_counter()
    for first, *further in asked:
        flow, waiting = engine.flow(rows), list(enumerate(shown))
        while waiting or flow.busy:
            while waiting and flow.free:
                number, picture = waiting.pop(0)
                flow.add(number, picture, PromptChoice(first, further=tuple(further)))
            for answer in flow.step():
                if answer.error is not None:
                    raise answer.error
                answers[int(answer.ticket)] += (answer.text, *answer.further)  # type: ignore[call-overload]
        reused += flow.stats.prefix.get("reused tokens", 0)
        tokens += flow.stats.prefix.get("tokens", 0)
    wait(engine.model.device)
    return PromptsRun(time.perf_counter() - began, answers, reused / (tokens or 1))


def record(name: str, rows: int, captions: int, made: list[PromptsRun], base: list[PromptsRun]) -> report.Record:
    """The record of a method: its time relative to a run per prompt, and whether the answers are the same."""
    seconds = [run.seconds for run in made]
    same = [
        a == b for run, other in zip(made, base, strict=True) for a, b in zip(run.answers, other.answers, strict=True)
    ]
    return {
        "suite": "prompts", "method": name, "rows": rows, "captions": captions,
        "n": len(made), "note": "",
        "seconds": statistics.median(seconds), **report.spread("speedup", over(base, made)),
        "reused": statistics.fmean(run.reused for run in made), "identical_rate": statistics.fmean(same),
    }  # fmt: skip
