"""The caption suite: compares static and continuous batches on many pictures with short and long answers."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmspec import registry, zoo
from mmspec.app import embedded, enabling
from mmspec.app.bench import drafters, report
from mmspec.app.bench.answers import enabled
from mmspec.app.bench.command import Outcome, matching, refuse, say
from mmspec.app.bench.questions import Question, read_questions
from mmspec.app.compare import Comparison, over
from mmspec.app.devices import wait
from mmspec.app.embedded import STOCK
from mmspec.app.engine import load
from mmspec.app.options import count, where
from mmspec.app.provenance import provenance
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel, Processor
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.batcher import Batcher, FinishedPrompt, StaticBatcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.statistics import Stats
from mmspec.zoo import scenes

HELD_OUT = 7003  # first number of seeds whose scenes are in no training, evaluation or other suite
PROMPTS = (zoo.PROMPTS["long"], zoo.PROMPTS["short"], "How many objects are there?")  # in turn
BASE = "static"
EVENLY = {"do_sample": True, "temperature": 1e4, "top_k": 0, "top_p": 1.0}  # all tokens are about equally likely


@dataclass(frozen=True)
class CaptionMethod:
    """A way to batch, with or without a drafter."""

    name: str
    batches: type[Batcher]
    drafter: object = None  # None: stock generate
    twin: str = BASE  # the static method with the same drafter
    options: dict[str, object] = field(default_factory=dict)  # of `mmspec.enable`


@dataclass(frozen=True)
class CaptionRun:
    seconds: float
    answers: tuple[tuple[int, ...], ...]
    stats: Stats | None  # of mmspec's rounds

    @property
    def pace(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


@dataclass(frozen=True)
class CaptionBench:
    model: GenerativeModel
    processor: Processor
    prompts: list[BatchFeature]  # inputs, one prompt each
    settings: dict[str, Any]

    def run(self, method: CaptionMethod, rows: int, count: int | None = None) -> CaptionRun:
        """Time the first `count` captions (default: all); garbage collection and enabling are not timed."""
        prompts = self.prompts[:count]
        with enabled(self.model, method.drafter, **method.options) as handle:
            batches = method.batches(self.model, self.processor, rows, **self.settings)
            gc.collect()
            wait(self.model.device)
            began = time.perf_counter()
            for number, inputs in enumerate(prompts):
                batches.add(number, inputs, seed=number)  # so that sampled texts are independent
            ends: dict[Hashable, FinishedPrompt] = {}
            while batches.busy:
                ends |= {end.ticket: end for end in batches.step()}
            wait(self.model.device)
            seconds = time.perf_counter() - began
        for end in ends.values():
            if end.error is not None:
                raise end.error
        answers = tuple(tuple(ends[number].tokens) for number in range(len(prompts)))
        return CaptionRun(seconds, answers, None if handle is None else handle.stats)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=embedded.MODEL, help="folder, name on the Hub, or the embedded one (%(default)s)")
    drafters.configure(parser, ", or ngram")
    add("--data", type=Path, metavar="PATH", help="your own questions, as for `bench vlm`")
    add("--prompt", help="for every picture: short, long, or a text; default: long, short and a question in turn")
    add("--unrelated", action="store_true", help="answers of random tokens, which show the cost of a drafter that "
        "cannot predict anything; static batches with the same seeds")  # fmt: skip
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as 'continuous*'")
    add("--images", type=count, default=24, help="captions per run (default: %(default)s)")
    add("--rows", type=count, nargs="+", default=[1, 2, 4, 8], help="batch sizes (default: 1 2 4 8)")
    add("--turns", type=count, default=3, help="timed runs of every method (default: %(default)s)")
    add("--max-new-tokens", type=count, default=256)
    where(parser)
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Measure each batch size in turn; yields whenever the outcome has new records."""
    engine = load(args.model, STOCK, args.device, args.dtype, args.max_new_tokens, 0)
    model = engine.model
    prompts = [
        chat_inputs(engine.processor, [q.prompt], [q.images]).to(model.device, model.dtype) for q in questions(args)
    ]
    bench = CaptionBench(model, engine.processor, prompts, engine.settings | (EVENLY if args.unrelated else {}))
    outcome.provenance = provenance(model.device, model.dtype) | {"model": args.model}
    chosen = matching(methods(model, args), None, args.without)
    kind = "unrelated texts" if args.unrelated else " ".join([*([args.prompt] if args.prompt else []), "captions"])
    for rows in args.rows:
        records = measure_rows(bench, rows, chosen, args.turns)
        outcome.records += [record | {"asked": kind} for record in records]
        speeds = [f"{r['method']} {r['captions_per_s']:.2f}" for r in records if r["n"]]
        say(f"{rows} at once, captions/s: {', '.join(speeds)}")
        yield


def questions(args: argparse.Namespace) -> list[Question]:
    """The user's questions; or drawn pictures with one prompt, or prompts for long, short and very short answers."""
    prompts = PROMPTS if args.prompt is None else (zoo.PROMPTS.get(args.prompt, args.prompt),)
    if args.data is None:
        drawn = [scenes.draw(np.random.default_rng([HELD_OUT, args.seed, i])) for i in range(args.images)]
        return [Question((scenes.render(s),), prompts[i % len(prompts)]) for i, s in enumerate(drawn)]
    own, _ = read_questions(args.data, args.images, 0)
    if own[0].prompt:
        refuse(args, f"the questions of {args.data} have their own prompts", prompt=None)
    return [q if q.prompt else Question(q.images, prompts[i % len(prompts)]) for i, q in enumerate(own)]


def methods(model: GenerativeModel, args: argparse.Namespace) -> list[CaptionMethod]:
    """Static and continuous batches, without a drafter and with each; for unrelated texts only static ones."""
    ways = [CaptionMethod(BASE, StaticBatcher), CaptionMethod("continuous", ContinuousBatcher, Plain())]
    given = enabling.given(args.enable)
    named = drafters.read(args, model=model) or {"ngram": registry.drafter_class("ngram")()}
    for title, drafter in named.items():
        title = f"{BASE} + {title}"
        ways.append(CaptionMethod(title, StaticBatcher, drafter, title, given))
        ways.append(CaptionMethod(title.replace(BASE, "continuous", 1), ContinuousBatcher, drafter, title, given))
    if args.unrelated:  # rows of a continuous batch have separate seeds
        ways = [replace(m, options=m.options | {"reproducible": True}) for m in ways if m.batches is StaticBatcher]
    return ways


def measure_rows(bench: CaptionBench, rows: int, chosen: list[CaptionMethod], turns: int) -> list[report.Record]:
    """Warm each method up, measure its memory, then time all of them in turn."""
    comparison: Comparison[CaptionMethod, int | None, CaptionRun] = Comparison(
        chosen, lambda method, count: bench.run(method, rows, count)
    )
    comparison.warm_up(rows + 2, [BASE], bench.model.device)  # more than one batch, so that rows are reused
    runs = comparison.measure([None] * turns)
    return [
        {"suite": "caption", "method": m.name, "rows": rows, "captions": len(bench.prompts)}
        | figures(m, runs, rows)
        | {"peak_mb": comparison.peaks.get(m.name), "note": comparison.notes.get(m.name, "")}
        for m in chosen
    ]


def figures(method: CaptionMethod, runs: dict[str, list[CaptionRun]], rows: int) -> report.Record:
    """The figures of one method from its timed runs; None for those that do not apply."""
    own = runs.get(method.name, [])
    total = report.total(own)
    spent = sum(total.seconds.values())
    lengths = [len(answer) for run in own[:1] for answer in run.answers]
    same = [a == b for run, base in zip(own, runs[BASE], strict=False)
            for a, b in zip(run.answers, base.answers, strict=True)]  # fmt: skip
    stock = method.name == BASE
    rounds = total.row_rounds / total.rounds if total.rounds else None
    return {
        "stock_path": stock,
        **report.spread("speedup_e2e", over(runs[BASE], own)),
        **report.spread("gain", over(runs.get(method.twin, []), own)),
        **report.spread("captions_per_s", [run.pace for run in own]),
        **report.spread("tokens_per_s", [run.tokens / run.seconds for run in own]),
        "rows_per_round": _useful(lengths, rows) if stock else rounds,
        "tokens_per_target_call": 1.0 if stock else total.tokens_per_target_call if own else None,
        "prefill_share": total.seconds.get("prefill", 0.0) / spent if spent else None,
        "identical_rate": statistics.fmean(same) if same else None,
        "length": (min(lengths), statistics.fmean(lengths), max(lengths)) if lengths else None,
        "n": len(own),
    }


def _useful(lengths: list[int], rows: int) -> float | None:
    """Mean number of unfinished rows per step of the static batches, after the prefill."""
    batches = [lengths[first : first + rows] for first in range(0, len(lengths), rows)]
    steps = sum(max(batch) - 1 for batch in batches)
    return sum(length - 1 for length in lengths) / steps if steps else None
