"""The json suite: captions constrained by a JSON schema, with stock `generate` and with mmspec."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import jsonschema

import mmspec
from benchmarks.suites import subject
from mmspec.app.bench import questions, report
from mmspec.app.bench.answers import TimedCall
from mmspec.app.bench.command import Outcome, say
from mmspec.app.bench.questions import Question
from mmspec.app.compare import Comparison, Method, over
from mmspec.checkpoints.files import Json
from mmspec.drafters.plain import Plain

SCHEMA = {
    "type": "object",
    "properties": {
        "caption": {"type": "string", "maxLength": 200},
        "objects": {"type": "array", "maxItems": 5, "items": {"type": "string", "maxLength": 30}},
    },
    "required": ["caption", "objects"],
    "additionalProperties": False,
}


def configure(parser: argparse.ArgumentParser) -> None:
    subject.configure(parser, 256)
    schema = "of the captions; default: a caption, and a list of objects"
    parser.add_argument("--schema", type=Path, metavar="FILE", help=schema)
    questions.configure(parser)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    drafter = subject.named(args)
    schema = json.loads(args.schema.read_text(encoding="utf-8")) if args.schema else SCHEMA
    bench = subject.timed(args, outcome, drafter=drafter)
    grammar = {"logits_processor": [mmspec.json_grammar(bench.processor, schema)]}
    ways = {"stock": None, "forced tokens alone": Plain(), drafter: subject.fitted(bench, drafter)}
    methods = [Method(name, way, arguments=grammar) for name, way in ways.items()]

    def run(method: Method, question: Question) -> TimedCall:
        return bench.call(method, 0.0, bench.inputs([question]), args.seed)

    for shown, some in questions.asked(args).items():
        comparison = Comparison(methods, run)
        comparison.warm_up(some[0], ["stock"])
        calls = comparison.measure(some)
        for method in comparison.able:
            own = calls[method.name]
            texts = bench.processor.batch_decode([list(c.answers[0]) for c in own], skip_special_tokens=True)
            outcome.records.append(record(str(shown) or "picture", method.name, own, calls["stock"], texts, schema))
            say(f"{shown}: {method.name} {outcome.records[-1]['valid_rate']:.1%} valid")
        yield


def record(
    cell: str, name: str, made: list[TimedCall], stock: list[TimedCall], texts: list[str], schema: Json
) -> report.Record:
    """The record of a method: the share of valid captions, and its time relative to stock on the same pictures."""
    return {
        "suite": "json", "cell": cell, "method": name, "n": len(made), "note": "",
        "valid_rate": statistics.fmean(valid(text, schema) for text in texts),
        "tokens": statistics.fmean(call.tokens for call in made),
        "tokens_per_target_call": sum(c.later for c in made) / max(1, sum(c.steps for c in made)),
        "seconds": statistics.median(call.seconds for call in made), **report.spread("speedup", over(stock, made)),
        "identical_rate": statistics.fmean(a.answers == b.answers for a, b in zip(made, stock, strict=True)),
    }  # fmt: skip


def valid(text: str, schema: Json) -> bool:
    """Whether a text is JSON of this schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
