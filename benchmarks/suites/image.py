"""The image suite: speed, and quality measured on many pictures per method."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from benchmarks.suites import image_methods, mar, quality
from benchmarks.suites.gallery import Gallery, gallery_of
from benchmarks.suites.plots import CURVES
from benchmarks.suites.quality import ImagePrompts, Judge
from benchmarks.suites.static_loop import StaticBench
from benchmarks.suites.subject import refuse
from mmspec.app import enabling
from mmspec.app.bench import drafters, image
from mmspec.app.bench.command import BenchError, Outcome, matching, say, seeds_of
from mmspec.app.bench.image import BASE, ImageBench, charges, facts, with_rule
from mmspec.app.bench.report import Record
from mmspec.app.compare import Method
from mmspec.app.devices import EngineError
from mmspec.app.image_model import ModelSubject, is_mar
from mmspec.app.options import count
from mmspec.app.painter import ImageSubject
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.protocols import SessionView, Target
from mmspec.types import NO_TOKEN, Draft
from mmspec.zoo import pictures

GRID = 8  # pictures per method on the sheet
QUALITY = "image-quality"  # the `suite` of its records
UNKNOWN = ("fd_ar", "fd_over_noise", "fd_real", "precision", "recall", "faithfulness", "all_right", "compression",
           "spent", "spent_max")  # fmt: skip
DEFAULT_QUALITY = ("ar", "jacobi-*-16", "jacobi-pac", "eagle*", "*+*")
OF_TOKENS: dict[str, object] = {  # flags for models that draw token ids, and their defaults
    "enable": [], "prompts": None, "rule": [], "budget": None, "top_k": None, "grid": None,
    "quality_methods": None, "noise_runs": 2, "sweep": None, "pictures": None,
}  # fmt: skip


class Hostile(JacobiDrafter):
    """Drafts tokens that are almost always wrong, for targets whose distribution is a point mass."""

    def propose(self, session: SessionView, target: Target) -> Draft:
        draft = super().propose(session, target)
        if draft.tree.size == 1:
            return draft
        assert draft.q is None, "changed tokens do not follow q, which would break the distribution"
        others = torch.where(draft.tokens == NO_TOKEN, NO_TOKEN, (draft.tokens + self.vocab // 2) % self.vocab)
        return replace(draft, tokens=torch.cat([draft.tokens[:, :1], others[:, 1:]], 1))


def configure(parser: argparse.ArgumentParser) -> None:
    image.configure(parser)
    images = next(action for action in parser._actions if action.dest == "images")
    images.type, images.help = int, "prompts timed side by side; 0: no timing (%(default)s)"
    parser.add_argument("--grid", type=Path, metavar="FILE", help="a sheet of pictures of all methods, same seeds")
    good = parser.add_argument_group("how good the pictures are")
    good.add_argument("--quality-images", type=int, default=0, metavar="N", help="pictures to measure per method")
    good.add_argument("--quality-batch", type=count, default=8, metavar="N", help="pictures per call (%(default)s)")
    good.add_argument("--pictures", type=Path, metavar="FOLDER", help="keep the pictures here; a second run resumes")
    good.add_argument("--quality-methods", nargs="+", metavar="PATTERN", help=f"default: {' '.join(DEFAULT_QUALITY)}")
    good.add_argument("--noise-runs", type=int, default=2, metavar="N", help="further runs of ar (%(default)s)")
    good.add_argument(
        "--sweep", nargs="*", metavar="FAMILY", help="rules at several settings, as curves (default: all)"
    )


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Measure timings, then quality."""
    if is_mar(args.model):
        refuse(args, "a MAR draws classes by its own drafts, so this bench has no use for that here", **OF_TOKENS)
        yield from mar.measure(args, outcome)
        return
    if not args.quality_images:
        why = "no quality is measured without --quality-images N"
        refuse(args, why, quality_methods=None, sweep=None, pictures=None)
    if args.images == 0 and args.grid is None and not args.quality_images:
        raise BenchError("nothing to do; give --images, --grid or --quality-images")
    bench = StaticBench(**vars(image.begin(args, outcome)))
    if args.images:
        yield from image.timings(bench, args, outcome, methods)
    chosen = matching(methods(bench.painter, args), args.methods, args.without)
    if args.grid:
        draw_sheet(bench, chosen, image.prompts(bench.painter, args, GRID), args.grid)
    if args.quality_images:
        for record in judge_all(bench, to_judge(bench.painter, args), ask(bench.painter, args), args):
            outcome.records.append(record)
            yield


def draw_sheet(bench: ImageBench, chosen: list[Method], prompts: Sequence[str | int], path: Path) -> None:
    """Write a sheet with a row per method, and the same prompt and seed in each column."""
    group = list(zip(prompts, seeds_of(1, len(prompts), bench.seed), strict=True))
    rows = []
    for method in chosen:
        if method.arguments:  # plain loops with fixed shapes draw the pictures of ar
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


def sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> Image.Image:
    """All pictures on one sheet, with each row's title above it."""
    side = max(max(picture.size) for _, row in rows for picture in row)
    gap, head = 4, 14
    width = max(len(row) for _, row in rows) * (side + gap) + gap
    page = Image.new("RGB", (width, len(rows) * (side + gap + head) + gap), "white")
    pen = ImageDraw.Draw(page)
    for line, (title, row) in enumerate(rows):
        top = gap + line * (side + gap + head)
        pen.text((gap, top), title.encode("latin-1", "replace").decode("latin-1"), fill="black")
        for column, picture in enumerate(row):
            page.paste(picture, (gap + column * (side + gap), top + head))
    return page


def methods(painter: ImageSubject, args: argparse.Namespace) -> list[Method]:
    """Plain paths, every drafter, every rule, and drafts that are almost always wrong."""
    hostile = {"window": 16, "reproducible": True}
    more = [Method("hostile-16", Hostile(), hostile), Method("hostile-16-auto", Hostile(), hostile | {"auto": True})]
    trained, given = drafters.read(args, painter.model), enabling.given(args.enable)
    named = list(trained.items())
    known = [*image_methods.lossless(named), *image_methods.relaxed(painter.codes, named, args.rule, args.budget)]
    own = not isinstance(painter, ModelSubject)  # LlamaGen, which also has plain loops of fixed shapes
    return [
        replace(m, options={**m.options, **given}) if m.drafter in trained.values() else m
        for m in [*known, *more] if own or not (m.arguments or m in more)
    ]  # fmt: skip


def to_judge(painter: ImageSubject, args: argparse.Namespace) -> list[Method]:
    """The methods whose quality is measured, those on the curves included."""
    known = methods(painter, args)
    eagles = any(m.name.startswith("eagle") for m in known)
    wanted = args.quality_methods or args.methods or [p for p in DEFAULT_QUALITY if eagles or p != "eagle*"]
    chosen = [m for m in matching(known, wanted, args.without) if not m.arguments]
    return chosen + ([] if args.sweep is None else swept(painter.codes, args.budget, args.sweep))


def swept(codes: int, budget: float | None, families: Sequence[str] = ()) -> list[Method]:
    """The points of the curves of these families of rules (default: all), with the Jacobi drafter.

    Raises:
        BenchError: an unknown family.
    """
    curves = image_methods.sweeps(codes)
    unknown = [family for family in families if family not in curves]
    if unknown:
        raise BenchError(f"there is no family of rules {unknown[0]!r} to sweep; choose from {', '.join(curves)}")
    base = Method("jacobi", "jacobi", BASE)
    return [
        with_rule(f"{family} {value:g}", base, spec, budget, family=family, parameter=value)
        for family, points in curves.items()
        if not families or family in families
        for value, spec in points
    ]


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


def curves(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Quality records by curve; lossless methods form one curve, single relaxed methods another."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        if record["suite"] == QUALITY and record["fd_ar"] is not None:
            single = "distribution kept" if record["lossless"] else "distribution changed"
            lines.setdefault(record["family"] or single, []).append(record)
    return {name: sorted(some, key=lambda r: r["compression"]) for name, some in lines.items()}


def draw_curves(panel: Any, records: Sequence[Record]) -> None:
    """Plot Fréchet distance over tokens per forward, one line per swept rule; the band is the noise of ar."""
    for name, some in curves(records).items():
        style = "o-" if some[0]["family"] else "^" if name == "distribution kept" else "x"
        panel.plot([r["compression"] for r in some], [r["fd_ar"] for r in some], style, label=name, markersize=4)
    noise = next((r["noise"] for r in records if r["suite"] == QUALITY and r["noise"]), None)
    if noise:
        panel.axhspan(min(noise), max(noise), color="#9aa3ad", alpha=0.3, label="two runs of ar")
    panel.set_xlabel("tokens per forward", fontsize=9)
    panel.set_ylabel("Fréchet distance to ar", fontsize=9)
    panel.legend(fontsize=7)


CURVES[QUALITY] = draw_curves
