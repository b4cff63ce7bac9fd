"""The image suite: speed, and quality measured on many pictures per method."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.suites import image_methods, mar, quality
from benchmarks.suites.gallery import Gallery, gallery_of
from benchmarks.suites.quality import ImagePrompts, Judge
from benchmarks.suites.static_loop import StaticBench
from benchmarks.suites.subject import refuse
from mmspec.app import enabling
from mmspec.app.bench import drafters, image
from mmspec.app.bench.command import BenchError, Outcome, matching, say
from mmspec.app.bench.image import ImageBench, charges, facts
from mmspec.app.bench.report import Record
from mmspec.app.compare import Method
from mmspec.app.devices import EngineError
from mmspec.app.image_model import ModelSubject, is_mar
from mmspec.app.options import count
from mmspec.app.painter import ImageSubject
from mmspec.zoo import pictures

QUALITY = "image-quality"  # the `suite` of its records
UNKNOWN = ("fd_ar", "fd_over_noise", "fd_real", "precision", "recall", "faithfulness", "all_right", "compression",
           "spent", "spent_max")  # fmt: skip
DEFAULT_QUALITY = ("ar", "jacobi-*-16", "jacobi-pac", "eagle*", "*+*")
OF_TOKENS: dict[str, object] = {  # flags for models that draw token ids, and their defaults
    "enable": [], "prompts": None, "rule": [], "budget": None, "top_k": None,
    "noise_runs": 2, "pictures": None,
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    image.configure(parser)
    images = next(action for action in parser._actions if action.dest == "images")
    images.type, images.help = int, "prompts timed side by side; 0: no timing (%(default)s)"
    good = parser.add_argument_group("how good the pictures are")
    judged = f"pictures to measure of each of --methods (default: {' '.join(DEFAULT_QUALITY)})"
    good.add_argument("--quality-images", type=int, default=0, metavar="N", help=judged)
    good.add_argument("--quality-batch", type=count, default=8, metavar="N", help="pictures per call (%(default)s)")
    good.add_argument("--pictures", type=Path, metavar="FOLDER", help="keep the pictures here; a second run resumes")
    good.add_argument("--noise-runs", type=int, default=2, metavar="N", help="further runs of ar (%(default)s)")


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Measure timings, then quality."""
    if is_mar(args.model):
        refuse(args, "a MAR draws classes by its own drafts, so this bench has no use for that here", **OF_TOKENS)
        yield from mar.measure(args, outcome)
        return
    if not args.quality_images:
        why = "no quality is measured without --quality-images N"
        refuse(args, why, pictures=None)
    if args.images == 0 and not args.quality_images:
        raise BenchError("nothing to do; give --images or --quality-images")
    bench = StaticBench(**vars(image.begin(args, outcome)))
    if args.images:
        yield from image.timings(bench, args, outcome, methods)
    if args.quality_images:
        for record in judge_all(bench, to_judge(bench.painter, args), ask(bench.painter, args), args):
            outcome.records.append(record)
            yield


def methods(painter: ImageSubject, args: argparse.Namespace) -> list[Method]:
    """Plain paths, every drafter, and every rule."""
    trained, given = drafters.read(args, painter.model), enabling.given(args.enable)
    named = list(trained.items())
    known = [*image_methods.lossless(named), *image_methods.relaxed(painter.codes, named, args.rule, args.budget)]
    own = not isinstance(painter, ModelSubject)  # LlamaGen, which also has plain loops of fixed shapes
    return [
        replace(m, options={**m.options, **given}) if m.drafter in trained.values() else m
        for m in known
        if own or not m.arguments
    ]


def to_judge(painter: ImageSubject, args: argparse.Namespace) -> list[Method]:
    """The methods whose quality is measured."""
    known = methods(painter, args)
    eagles = any(m.name.startswith("eagle") for m in known)
    wanted = args.methods or [p for p in DEFAULT_QUALITY if eagles or p != "eagle*"]
    return [m for m in matching(known, wanted, args.without) if not m.arguments]


def ask(painter: ImageSubject, args: argparse.Namespace) -> ImagePrompts:
    """The prompts for the quality measures; held-out scenes also have real pictures."""
    prompts = image.prompts(painter, args, args.quality_images)
    if args.prompts is not None or painter.classes:
        return ImagePrompts(prompts)
    scenes = [scene for scene, _ in pictures.held_out(len(prompts), image.HELD_OUT + args.seed)]
    return ImagePrompts(prompts, scenes, [pictures.render(scene) for scene in scenes])


def judge_all(bench: ImageBench, left: list[Method], asked: ImagePrompts, args: argparse.Namespace) -> Iterator[Record]:
    """The quality of each method with the seeds of run 1; a method that fails gets a note."""
    count = len(asked.prompts)
    if count <= quality.NEIGHBOURS:
        raise BenchError(f"--quality-images must be more than {quality.NEIGHBOURS}; got {count}")

    def draw(method: Method, run: int) -> Gallery:
        return gallery_of(bench, method, run, asked.prompts, args)

    runs = range(1 + max(1, args.noise_runs))
    judge = Judge(partial(draw, Method("ar")), runs, asked, bench.painter.model.device)
    noise = statistics.fmean(judge.noise)
    for method in left:
        record: Record = {"suite": QUALITY, "backbone": quality.EMBEDDED, "n": count, **facts(method),
                         "noise": judge.noise, **dict.fromkeys(UNKNOWN), "note": ""}  # fmt: skip
        try:
            drawn = judge.runs[1] if method.name == "ar" else draw(method, 1)
        except EngineError as error:
            yield record | {"note": f"failed: {str(error)[:200]}"}
            continue
        seen, distance, real, read = judge.look(drawn.images)
        inside = quality.precision_recall(judge.reference if judge.real is None else judge.real, seen)
        record |= {
            "fd_ar": distance,
            "fd_over_noise": distance / noise if noise else None,
            "fd_real": real,
            "compression": drawn.compression,
            "forwards": drawn.forwards,
            "seconds_per_image": drawn.seconds / count,
            **charges(drawn.spent, drawn.tokens),
            **dict(zip(("precision", "recall"), inside, strict=True)),
            **{name: value for name, value in read.items() if name != "n"},
        }
        say(f"{method.name}: {drawn.compression:.2f} tokens per forward, FD {distance:.4g} to ar (noise {noise:.4g})")
        yield record
