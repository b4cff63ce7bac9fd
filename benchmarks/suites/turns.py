"""The turns suite: the time to the first token of a second question about a picture, and of a second turn."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.suites import drawn, subject
from mmspec.app import enabling
from mmspec.app.bench import questions, report
from mmspec.app.bench.answers import TimedCall, VlmBench, enabled
from mmspec.app.bench.command import BenchError, Outcome, say
from mmspec.app.bench.questions import Question
from mmspec.app.compare import Comparison, Method, over
from mmspec.pipelines.prompts import chat_inputs

KEPT = "512MB"  # default prefix_cache of the method that has one


@dataclass(frozen=True)
class Talk:
    """The times and tokens of three calls about one picture."""

    first: TimedCall
    second: TimedCall  # another question about the same picture
    turn: TimedCall  # that question after the first one and its answer
    reused: float  # share of the prompt tokens taken from the prefix cache
    kept: int  # bytes after all three calls

    @property
    def calls(self) -> tuple[TimedCall, ...]:
        return self.first, self.second, self.turn


def talk(bench: VlmBench, other: str, method: Method, question: Question) -> Talk:
    """Three calls of a method, starting with an empty prefix cache."""
    with enabled(bench.model, method.drafter, **method.options) as handle:

        def ask(prompt: str, before: tuple[tuple[str, str], ...] = ()) -> TimedCall:
            inputs = chat_inputs(bench.processor, [prompt], [question.images], before=before)
            stats = None if handle is None else handle.stats
            return bench.timed(inputs.to(bench.model.device, bench.model.dtype), stats, do_sample=False)

        first, second = ask(question.prompt), ask(other)
        answer = bench.processor.batch_decode([list(first.answers[0])], skip_special_tokens=True)[0]
        turn = ask(other, ((question.prompt, answer),))
        read = {} if handle is None else handle.stats.prefix
        kept = 0 if handle is None else handle.stats.kept_bytes
    return Talk(first, second, turn, read.get("reused tokens", 0) / read.get("tokens", 1), kept)


def configure(parser: argparse.ArgumentParser) -> None:
    subject.configure(parser, 32)
    enabling.add(parser)
    second = "what is asked second (default: %(default)s)"
    parser.add_argument("--second", default="What is in this image?", help=second)
    questions.configure(parser)
    drawn.configure(parser)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    drafter = subject.named(args)
    try:
        options = enabling.given(args.enable, drafter)
    except enabling.EnableError as error:
        raise BenchError(str(error)) from error
    bench = subject.timed(args, outcome, drafter=drafter)
    made = subject.fitted(bench, drafter, **options)
    whole = Method("whole prompts", drafter=made, options=options | {"prefix_cache": None})
    kept = replace(whole, name="prefix_cache", options={"prefix_cache": KEPT} | options)
    chosen = [Method("stock"), whole, kept]
    for shown, some in drawn.asked(args).items():
        comparison = Comparison(chosen, partial(talk, bench, args.second))
        comparison.warm_up(some[0], ["stock"])
        made_by = comparison.measure(some)
        for method in comparison.able:
            outcome.records.append(record(str(shown) or "picture", method.name, made_by[method.name], made_by["stock"]))
            say(f"{shown}: {method.name} {outcome.records[-1]['second_share']:.2f}")
        yield


def record(cell: str, name: str, made: list[Talk], stock: list[Talk]) -> report.Record:
    """The record of a method: times to first tokens, and those of later calls relative to the first question."""

    def milliseconds(which: str) -> list[float]:
        return [1e3 * getattr(talk, which).first for talk in made]

    firsts = [talk.first for talk in made]
    shares = {which: over([getattr(t, which) for t in made], firsts, "first") for which in ("second", "turn")}
    same = [[c.answers for c in m.calls] == [c.answers for c in s.calls] for m, s in zip(made, stock, strict=True)]
    return {
        "suite": "turns", "cell": cell, "method": name, "n": len(made), "note": "",
        **{f"{which}_ms": statistics.median(milliseconds(which)) for which in ("first", "second", "turn")},
        **report.spread("second_share", shares["second"]), **report.spread("turn_share", shares["turn"]),
        "reused": statistics.fmean(talk.reused for talk in made),
        "kept_mb": statistics.fmean(talk.kept for talk in made) / 2**20,
        "identical_rate": statistics.fmean(same),
    }  # fmt: skip
