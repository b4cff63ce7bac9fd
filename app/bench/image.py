"""The image suite: every method draws the same prompts in turn, each call timed; then many pictures, and how good."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspec.app import embedded
from mmspec.app.bench import drafters, gallery, mar, quality, report_image
from mmspec.app.bench.command import BenchError, Outcome, batches, matching, refuse, say, seeds_of
from mmspec.app.bench.gallery import Gallery
from mmspec.app.bench.image_methods import ImageMethod, lossless, relaxed, swept
from mmspec.app.bench.image_plain import ImageBench
from mmspec.app.bench.judge import ImagePrompts, Judge
from mmspec.app.bench.report import Record
from mmspec.app.compare import Comparison
from mmspec.app.devices import EngineError, first_line
from mmspec.app.mar import draws
from mmspec.app.media.inputs import images
from mmspec.app.options import count, from_zero, where
from mmspec.app.painter import ImageSubject, load, sheet
from mmspec.app.provenance import provenance
from mmspec.media import load_image
from mmspec.zoo import pictures

HELD_OUT = 2**31  # first seed of prompts that no training draws
GRID = 8  # pictures of a method on the sheet
UNKNOWN = ("fd_ar", "fd_over_noise", "fd_real", "precision", "recall", "faithfulness", "all_right", "compression",
           "spent", "spent_max")  # fmt: skip
OF_TOKENS: dict[str, Any] = {  # flags for models that draw tokens, and what they are if nobody says anything
    "drafters": None, "enable": [], "prompts": None, "real": None, "rule": [], "budget": None, "top_k": None,
    "quality_methods": None, "noise_runs": 2, "sweep": None, "pictures": None, "grid": None, "resume": False,
}  # fmt: skip
DEFAULT_QUALITY = ("ar", "jacobi-*-16", "jacobi-pac", "eagle*", "*+*")


def configure(parser: argparse.ArgumentParser) -> None:
    """What is drawn, by which methods, and what is measured."""
    add = parser.add_argument
    add(
        "--model",
        default=embedded.IMAGE_MODEL,
        help="folder or name on the Hub of a LlamaGenPipeline; `mar`, or a MARPipeline's folder (%(default)s)",
    )
    drafters.configure(parser)
    add("--prompts", type=Path, metavar="FILE", help="prompts of your own, one a line (default: held-out scenes)")
    add("--real", type=Path, metavar="FOLDER", help="real pictures for the distance, where the prompts are your own")
    add("--images", type=int, default=12, help="prompts timed side by side; 0: no timing (%(default)s)")
    add("--batch", type=count, nargs="+", default=[1, 4], help="pictures per timed call (default: 1 4)")
    add("--methods", nargs="+", metavar="PATTERN", help="ar and only these, such as 'jacobi-*' '*+scaled'")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as ar-compiled")
    add("--rule", nargs="+", default=[], metavar="SPEC", help="further rules, such as 'lantern(k=20, lam=1.2)'")
    add("--budget", type=float, help="distance in total variation that a relaxed rule may spend on a picture")
    add("--guidance", type=float)
    add("--top-k", type=int)
    add("--temperature", type=from_zero)
    good = parser.add_argument_group("how good the pictures are")
    good.add_argument("--quality-images", type=int, default=0, metavar="N", help="pictures per method; 0: not measured")
    good.add_argument("--quality-methods", nargs="+", metavar="PATTERN", help=f"default: {' '.join(DEFAULT_QUALITY)}")
    good.add_argument("--quality-batch", type=count, default=8, metavar="N", help="pictures per call (%(default)s)")
    good.add_argument("--noise-runs", type=int, default=2, metavar="N", help="ar beside the reference (%(default)s)")
    good.add_argument("--backbone", default=quality.EMBEDDED, help="any timm model, or the embedded tower (default)")
    good.add_argument(
        "--sweep", nargs="*", metavar="FAMILY", help="rules at several settings, as curves (default: all)"
    )
    good.add_argument("--pictures", type=Path, metavar="FOLDER", help="keep the pictures here; a second run goes on")
    parser.add_argument("--grid", type=Path, metavar="FILE", help="a sheet of pictures, all methods at the same seeds")
    parser.add_argument("--resume", action="store_true", help="go on with the records of an earlier run's --json")
    where(parser)
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Timing, the sheet, then quality; yields whenever the outcome has grown."""
    if draws(args.model):
        refuse(args, "a MAR draws classes by its own drafts, so this bench has no use for that here", **OF_TOKENS)
        yield from mar.measure(args, outcome)
        return
    if (args.images, args.quality_images) == (0, 0) and args.grid is None:
        raise BenchError("nothing is asked for; give --images, --quality-images or --grid")
    if not args.quality_images:
        why = "no quality is measured without --quality-images N"
        refuse(args, why, quality_methods=None, sweep=None, pictures=None, real=None)
    settings = {"guidance_scale": args.guidance, "top_k": args.top_k, "temperature": args.temperature}
    bench = ImageBench(load(args.model, args.device, args.dtype, **settings), args.seed)
    facts = {"model": args.model, "settings": bench.painter.settings, "seed": args.seed, "budget": args.budget}
    outcome.provenance = provenance(bench.painter.device, bench.painter.dtype) | facts
    if args.resume:
        take_up(args.json, outcome, facts)
    gc.freeze()  # what is loaded stays: the collection before each call need not look through it
    try:
        yield from _stages(bench, args, outcome)
    finally:
        gc.unfreeze()


def _stages(bench: ImageBench, args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    chosen, judged = methods(bench.painter, args)
    asked = ask(bench.painter, args)
    for batch in args.batch if args.images else ():
        found = timed(bench, chosen, asked.first(args.images).prompts, batch, outcome.records)
        outcome.records += found
        told = [f"{r['method']} {r['speedup_e2e']:.2f}x" for r in found if r["speedup_e2e"]]
        say(f"batch {batch}: {', '.join(told) or 'measured before'}")
        yield
    if args.grid:
        draw_sheet(bench, chosen, asked.first(GRID).prompts, args.grid)
        yield
    known = {"suite": report_image.QUALITY, "n": args.quality_images, "backbone": args.backbone}
    left = [m for m in judged if not _there(outcome.records, method=m.name, setting=m.setting, **known)]
    if args.quality_images and left:
        for record in judge_all(bench, left, asked.first(args.quality_images), args):
            outcome.records.append(record)
            yield


def methods(painter: ImageSubject, args: argparse.Namespace) -> tuple[list[ImageMethod], list[ImageMethod]]:
    """What is timed, and what is judged."""
    codes = painter.pipe.transformer.config.vocab
    trained = list(drafters.read(args, trained=True, model=painter.pipe.transformer).items())
    known = lossless(trained) + relaxed(codes, trained, args.rule, args.budget)
    given, named = drafters.options(args), [drafter for _, drafter in trained]
    known = [replace(m, way=replace(m.way, options={**m.way.options, **given})) if m.way.drafter in named else m
             for m in known]  # fmt: skip
    eagles = any(name.startswith("eagle") for name, _ in trained)
    wanted = args.quality_methods or args.methods or [p for p in DEFAULT_QUALITY if eagles or p != "eagle*"]
    judged = [m for m in matching(known, wanted, args.without) if not m.plain]
    judged += [] if args.sweep is None else swept(codes, args.budget, args.sweep)
    return matching(known, args.methods, args.without), judged


def ask(painter: ImageSubject, args: argparse.Namespace) -> ImagePrompts:
    """Prompts for all that is measured: the user's, or classes, or held-out scenes with their real pictures."""
    count = max(args.images, args.quality_images, GRID if args.grid else 0)
    if args.prompts is not None:
        lines = [line.strip() for line in _text(args.prompts).splitlines() if line.strip()]
        if not lines:
            raise BenchError(f"{args.prompts} holds no prompt; write one a line")
        prompts: list[Any] = [lines[i % len(lines)] for i in range(count)]
        if painter.classes:
            raise BenchError(f"{args.model} draws classes, not prompts; leave --prompts out")
    elif painter.classes:
        prompts = np.random.default_rng([HELD_OUT, args.seed]).integers(painter.classes, size=count).tolist()
    else:
        refuse(args, "held-out scenes have real pictures of their own; --real is for your own --prompts", real=None)
        drawn = pictures.held_out(count, HELD_OUT + args.seed)
        scenes = [scene for scene, _ in drawn]
        return ImagePrompts([caption for _, caption in drawn], scenes, [pictures.render(scene) for scene in scenes])
    return ImagePrompts(prompts, real=[load_image(path) for path in images(args.real)] if args.real else ())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the prompts of {path}: {first_line(error)}") from error


def take_up(path: Path | None, outcome: Outcome, facts: Record) -> None:
    """Take over the records of an earlier run, if it measured the same thing."""
    if path is None:
        raise BenchError("--resume goes on with a file of records; name it with --json")
    if not path.is_file():
        return
    earlier = json.loads(path.read_text())
    here = outcome.provenance
    same = [name for name in (*facts, "device", "dtype", "commit") if earlier["provenance"].get(name) != here.get(name)]
    if same:
        was, now = (str(held.get(same[0])) for held in (earlier["provenance"], here))
        raise BenchError(f"{path} was measured with {same[0]} {was}, this run has {now}; leave --resume out")
    outcome.records += earlier["records"]
    before = earlier["provenance"].pop("earlier", [])
    outcome.provenance["earlier"] = [*before, earlier["provenance"]]  # whose records they are


def _there(records: list[Record], **facts: Any) -> bool:
    return any(all(record.get(name) == value for name, value in facts.items()) for record in records)


def timed(
    bench: ImageBench, chosen: list[ImageMethod], prompts: Sequence[Any], batch: int, before: list[Record]
) -> list[Record]:
    """Warm each method up, then time all of them in turn on each batch; nothing if all are measured already."""
    if all(_there(before, suite=report_image.SPEED, batch=batch, method=m.name) for m in chosen):
        return []
    torch.compiler.reset()  # what was compiled for other lengths counts against the limit of recompilations
    before[:] = [r for r in before if (r["suite"], r.get("batch")) != (report_image.SPEED, batch)]
    groups = batches(list(zip(prompts, seeds_of(1, len(prompts), bench.seed), strict=True)), batch)
    comparison = Comparison(chosen, bench.call)
    comparison.warm_up(groups[0], ["ar"], read=lambda method: not method.plain)  # what is compiled cannot be watched
    made = comparison.measure(groups)
    best = report_image.fastest(made)
    slower = {name: f"slower than {best} here" for name in report_image.PLAIN if name in made and name != best}
    facts = {"suite": report_image.SPEED, "batch": batch}
    return [
        facts
        | m.facts
        | report_image.figures(m.name, made, best, comparison.reads.get(m.name))
        | {"note": comparison.notes.get(m.name, slower.get(m.name, ""))}
        for m in chosen
    ]


def draw_sheet(bench: ImageBench, chosen: list[ImageMethod], prompts: Sequence[Any], path: Path) -> None:
    """A row a method, the same prompt and seed in each column."""
    group = list(zip(prompts, seeds_of(1, len(prompts), bench.seed), strict=True))
    rows = []
    for method in chosen:
        if method.plain:
            continue
        try:
            painting = bench.call(method, group)
        except EngineError as error:
            say(f"{method.name} is not on the sheet: {error}")
            continue
        rows.append((f"{method.name}, {painting.compression:.2f} tokens per forward", painting.images))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows).save(path)
    say(f"sheet: {path}")


def judge_all(
    bench: ImageBench, left: list[ImageMethod], asked: ImagePrompts, args: argparse.Namespace
) -> Iterator[Record]:
    """The quality of each method, of run 1's seeds; one that fails says why."""
    count = len(asked.prompts)
    if count <= quality.NEIGHBOURS:
        raise BenchError(f"--quality-images must be more than {quality.NEIGHBOURS}; got {count}")
    if asked.real and len(asked.real) < count:
        raise BenchError(
            f"{len(asked.real)} real pictures for {count} drawn ones; only sets of equal size can be compared. Lower "
            "--quality-images or give more"
        )

    def draw(method: ImageMethod, run: int) -> Gallery:
        bench.go(method)
        keep = None if args.pictures is None else args.pictures / gallery.slug(method.name, run)
        told = {"setting": method.setting, "settings": bench.painter.settings, "model": args.model}
        seeds = seeds_of(run, count, bench.seed)
        try:
            return gallery.fill(bench.painter, asked.prompts, seeds, args.quality_batch, keep, told)
        except gallery.GalleryError as error:
            raise BenchError(str(error)) from error

    runs = range(1 + max(1, args.noise_runs))
    judge = Judge(partial(draw, ImageMethod("ar")), runs, asked, args.backbone, bench.painter.device)
    noise = statistics.fmean(judge.noise)
    for method in left:
        facts: Record = {"suite": report_image.QUALITY, "backbone": args.backbone, "n": count, **method.facts,
                         "noise": judge.noise, **dict.fromkeys(UNKNOWN), "note": ""}  # fmt: skip
        try:
            drawn = judge.runs[1] if method.name == "ar" else draw(method, 1)
        except EngineError as error:
            yield facts | {"note": f"failed: {str(error)[:200]}"}
            continue
        seen, distance, real, read = judge.look(drawn.images)
        inside = quality.precision_recall(judge.reference if judge.real is None else judge.real, seen)
        facts |= {
            "fd_ar": distance,
            "fd_over_noise": distance / noise if noise else None,
            "fd_real": real,
            "compression": drawn.compression,
            "forwards": drawn.forwards,
            "seconds_per_image": drawn.seconds / count,
            **report_image.charges(drawn.spent, drawn.tokens),
            **dict(zip(("precision", "recall"), inside, strict=True)),
            **{name: value for name, value in read.items() if name != "n"},
        }
        say(f"{method.name}: {drawn.compression:.2f} tokens per forward, FD {distance:.4g} to ar (noise {noise:.4g})")
        yield facts
