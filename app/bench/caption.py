"""The caption suite: compares static and continuous batches on many pictures with short and long answers."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec import registry, zoo
from mmspec.app import embedded, enabling
from mmspec.app.bench import drafters, report
from mmspec.app.bench.answers import enabled
from mmspec.app.bench.command import Outcome, matching, say
from mmspec.app.bench.questions import Question, Shown, labelled, pictures_of, read_questions
from mmspec.app.compare import Comparison, Method, over
from mmspec.app.devices import wait
from mmspec.app.embedded import STOCK
from mmspec.app.engine import Engine, load
from mmspec.app.options import count, seed_value, where
from mmspec.app.provenance import provenance
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel
from mmspec.pipelines.prompts import chat_inputs, text_alone
from mmspec.pipelines.serving.batcher import Batcher, FinishedPrompt, StaticBatcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.statistics import Stats

HELD_OUT = 7003  # first number of seeds whose scenes are in no training, evaluation or other suite
PROMPTS = (zoo.PROMPTS["long"], zoo.PROMPTS["short"], "How many objects are there?")  # in turn
BASE, CONTINUOUS = "static", "continuous"  # each method's name begins with one of these: its batches
BATCHERS: dict[str, type[Batcher]] = {BASE: StaticBatcher, CONTINUOUS: ContinuousBatcher}


@dataclass(frozen=True)
class CaptionRun:
    seconds: float
    answers: tuple[tuple[int, ...], ...]
    stats: Stats | None  # of mmspec's rounds

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or the embedded one (%(default)s)")
    drafters.configure(parser, ", or ngram")
    add("--data", type=Path, metavar="PATH", help="your own questions, as for `bench vlm`")
    add("--prompt", help="for every picture: short, long, or a text; default: long, short and a question in turn")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as 'continuous*'")
    add("--images", type=count, default=24, help="captions per run (default: %(default)s)")
    add("--rows", type=count, nargs="+", default=[1, 2, 4, 8], help="batch sizes (default: 1 2 4 8)")
    add("--turns", type=count, default=3, help="timed runs of every method (default: %(default)s)")
    add("--max-new-tokens", type=count, default=256)
    where(parser)
    add("--seed", type=seed_value, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Measure each batch size in turn; yields whenever the outcome has new records."""
    engine = load(args.model, STOCK, args.device, args.dtype, args.max_new_tokens, 0, sees=False)
    model = engine.model
    asked = questions(args, not text_alone(engine.processor))
    prompts = [chat_inputs(engine.processor, [q.prompt], [q.images]).to(model.device, model.dtype) for q in asked]
    outcome.provenance = provenance(model.device, model.dtype) | {"model": args.model}
    chosen = matching(methods(model, args), None, args.without)
    for rows in args.rows:
        records = measure_rows(engine, prompts, rows, chosen, args.turns)
        outcome.records += records
        speeds = [f"{r['method']} {r['captions_per_s']:.2f}" for r in records if r["n"]]
        say(f"{rows} at once, captions/s: {', '.join(speeds)}")
        yield


def questions(args: argparse.Namespace, pictures: bool = True) -> list[Question]:
    """The user's questions, without `pictures` for a model that reads text alone; or drawn pictures with one prompt,
    or prompts for long, short and very short answers."""
    if args.data is None:
        some = pictures_of(args, HELD_OUT, args.images, pictures)
    else:
        some = read_questions(args.data, args.images, pictures)
    if args.prompt is not None:
        [some] = labelled(Shown(), some, [args.prompt], str(args.data or "")).values()
    return [q if q.prompt else Question(q.images, PROMPTS[i % len(PROMPTS)]) for i, q in enumerate(some)]


def methods(model: GenerativeModel, args: argparse.Namespace) -> list[Method]:
    """Static and continuous batches, without a drafter and with each."""
    given = enabling.given(args.enable)
    named = drafters.read(args, model=model) or {"ngram": registry.drafter_class("ngram")()}
    drafted = [Method(f"{kind} + {title}", drafter, given) for title, drafter in named.items() for kind in BATCHERS]
    return [Method(BASE), Method(CONTINUOUS, Plain()), *drafted]


def run(engine: Engine, prompts: list[BatchFeature], method: Method, rows: int) -> CaptionRun:
    """Time the captions of these prompts; garbage collection and enabling are not timed."""
    model = engine.model
    with enabled(model, method.drafter, **method.options) as handle:
        batches = BATCHERS[method.name.split()[0]](model, engine.processor, rows, **engine.settings)
        gc.collect()
        wait(model.device)
        began = time.perf_counter()
        for number, inputs in enumerate(prompts):
            batches.add(number, inputs, seed=number)  # so that sampled texts are independent
        ends: dict[Hashable, FinishedPrompt] = {}
        while batches.busy:
            ends |= {end.ticket: end for end in batches.step()}
        wait(model.device)
        seconds = time.perf_counter() - began
    for end in ends.values():
        if end.error is not None:
            raise end.error
    answers = tuple(tuple(ends[number].tokens) for number in range(len(prompts)))
    return CaptionRun(seconds, answers, None if handle is None else handle.stats)


def measure_rows(
    engine: Engine, prompts: list[BatchFeature], rows: int, chosen: list[Method], turns: int
) -> list[report.Record]:
    """Warm each method up, measure its memory, then time all of them in turn."""

    def timed(method: Method, some: list[BatchFeature]) -> CaptionRun:
        return run(engine, some, method, rows)

    comparison = Comparison(chosen, timed)
    comparison.warm_up(prompts[: rows + 2], [BASE], engine.model.device)  # more than one batch, so that rows are reused
    runs = comparison.measure([prompts] * turns)
    return [
        {"suite": "caption", "method": m.name, "rows": rows, "captions": len(prompts), **figures(m.name, runs)}
        | {"peak_mb": comparison.peaks.get(m.name), "note": comparison.notes.get(m.name, "")}
        for m in chosen
    ]


def figures(name: str, runs: dict[str, list[CaptionRun]]) -> dict[str, Any]:
    """The figures of one method from its timed runs; None for those that do not apply."""
    own, twin = runs.get(name, []), runs.get(name.replace(CONTINUOUS, BASE, 1), [])
    total = report.total(own)
    spent = sum(total.seconds.values())
    lengths = [len(answer) for run in own[:1] for answer in run.answers]
    same = [a == b for run, base in zip(own, runs[BASE], strict=False)
            for a, b in zip(run.answers, base.answers, strict=True)]  # fmt: skip
    stock = name == BASE
    return {
        "stock_path": stock,
        **report.spread("speedup_e2e", over(runs[BASE], own)),
        **report.spread("gain", over(twin, own)),
        **report.spread("captions_per_s", [len(run.answers) / run.seconds for run in own]),
        **report.spread("tokens_per_s", [run.tokens / run.seconds for run in own]),
        "tokens_per_target_call": 1.0 if stock else total.tokens_per_target_call if own else None,
        "prefill_share": total.seconds.get("prefill", 0.0) / spent if spent else None,
        "identical_rate": statistics.fmean(same) if same else None,
        "length": (min(lengths), statistics.fmean(lengths), max(lengths)) if lengths else None,
        "n": len(own),
    }
