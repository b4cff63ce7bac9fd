"""The image suite, also with many pictures of each method, and how good they are."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites import mar, quality
from benchmarks.suites.judge import ImagePrompts, Judge
from mmspec.app.bench import image
from mmspec.app.bench.command import BenchError, Outcome, matching, refuse, say
from mmspec.app.bench.gallery import Gallery
from mmspec.app.bench.image_methods import BASE, ImageMethod, sweeps, with_rule
from mmspec.app.bench.image_plain import ImageBench
from mmspec.app.bench.report import CURVES, Record
from mmspec.app.bench.report_image import charges
from mmspec.app.devices import EngineError
from mmspec.app.mar import draws
from mmspec.app.media.inputs import images
from mmspec.app.painter import DrawingMethod, ImageSubject
from mmspec.media import load_image
from mmspec.zoo import pictures

QUALITY = "image-quality"  # the suite of its records
UNKNOWN = ("fd_ar", "fd_over_noise", "fd_real", "precision", "recall", "faithfulness", "all_right", "compression",
           "spent", "spent_max")  # fmt: skip
DEFAULT_QUALITY = ("ar", "jacobi-*-16", "jacobi-pac", "eagle*", "*+*")
OF_TOKENS: dict[str, object] = {  # flags for models that draw tokens, and what they are if nobody says anything
    "enable": [], "prompts": None, "rule": [], "budget": None, "top_k": None, "grid": None,
    "resume": False, "real": None, "quality_methods": None, "noise_runs": 2, "sweep": None, "pictures": None,
    "clip": [], "inception": None, "reference": None,
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    image.configure(parser)
    good = parser.add_argument_group("how good the pictures are")
    good.add_argument("--quality-methods", nargs="+", metavar="PATTERN", help=f"default: {' '.join(DEFAULT_QUALITY)}")
    good.add_argument("--noise-runs", type=int, default=2, metavar="N", help="ar beside the reference (%(default)s)")
    good.add_argument("--backbone", default=quality.EMBEDDED, help="any timm model, or the embedded tower (default)")
    good.add_argument(
        "--sweep", nargs="*", metavar="FAMILY", help="rules at several settings, as curves (default: all)"
    )
    good.add_argument("--real", type=Path, metavar="FOLDER", help="real pictures for the distance, where the prompts "
        "are your own")  # fmt: skip


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    if draws(args.model):
        refuse(args, "a MAR draws classes by its own drafts, so this bench has no use for that here", **OF_TOKENS)
        yield from mar.measure(args, outcome)
        return
    if not args.quality_images:
        why = "no quality is measured without --quality-images N"
        refuse(args, why, quality_methods=None, sweep=None, pictures=None, real=None)
    yield from image.measure(args, outcome, judged if args.quality_images else None)


def judged(bench: ImageBench, args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """The quality of all methods that an earlier run has not judged."""
    known = {"suite": QUALITY, "n": args.quality_images, "backbone": args.backbone}
    left = [
        m for m in methods(bench.painter, args)
        if not image.there(outcome.records, method=m.name, setting=m.setting, **known)
    ]  # fmt: skip
    for record in judge_all(bench, left, ask(bench.painter, args), args) if left else ():
        outcome.records.append(record)
        yield


def methods(painter: ImageSubject, args: argparse.Namespace) -> list[ImageMethod]:
    """What is judged, the points of the curves included."""
    known = image.methods(painter, args)
    eagles = any(m.name.startswith("eagle") for m in known)
    wanted = args.quality_methods or args.methods or [p for p in DEFAULT_QUALITY if eagles or p != "eagle*"]
    chosen = [m for m in matching(known, wanted, args.without) if not m.plain]
    return chosen + ([] if args.sweep is None else swept(painter.codes, args.budget, args.sweep))


def swept(codes: int, budget: float | None, families: Sequence[str] = ()) -> list[ImageMethod]:
    """The points of the curves of these families (none named: of all), on the Jacobi drafter.

    Raises:
        BenchError: a family that there is not.
    """
    curves = sweeps(codes)
    unknown = [family for family in families if family not in curves]
    if unknown:
        raise BenchError(f"there is no family of rules {unknown[0]!r} to sweep; choose from {', '.join(curves)}")
    base = DrawingMethod("jacobi", dict(BASE))
    return [
        with_rule(f"{family} {value:g}", base, spec, budget, (family, value))
        for family, points in curves.items()
        if not families or family in families
        for value, spec in points
    ]


def ask(painter: ImageSubject, args: argparse.Namespace) -> ImagePrompts:
    """As many prompts as are judged, with the scenes that they describe and their real pictures, or the user's."""
    prompts = image.prompts(painter, args, args.quality_images)
    if args.prompts is None and not painter.classes:
        refuse(args, "held-out scenes have real pictures of their own; --real is for your own --prompts", real=None)
        scenes = [scene for scene, _ in pictures.held_out(len(prompts), image.HELD_OUT + args.seed)]
        return ImagePrompts(prompts, scenes, [pictures.render(scene) for scene in scenes])
    return ImagePrompts(prompts, real=[load_image(path) for path in images(args.real)] if args.real else ())


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
        return image.gallery_of(bench, method, run, asked.prompts, args)

    runs = range(1 + max(1, args.noise_runs))
    judge = Judge(partial(draw, ImageMethod("ar")), runs, asked, args.backbone, bench.painter.device)
    noise = statistics.fmean(judge.noise)
    for method in left:
        facts: Record = {"suite": QUALITY, "backbone": args.backbone, "n": count, **method.facts,
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
            **charges(drawn.spent, drawn.tokens),
            **dict(zip(("precision", "recall"), inside, strict=True)),
            **{name: value for name, value in read.items() if name != "n"},
        }
        say(f"{method.name}: {drawn.compression:.2f} tokens per forward, FD {distance:.4g} to ar (noise {noise:.4g})")
        yield facts


def curves(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Quality records by the curve that they belong to; the single methods, lossless and bent, make one each."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        if record["suite"] == QUALITY and record["fd_ar"] is not None:
            single = "distribution kept" if record["lossless"] else "distribution bent"
            lines.setdefault(record["family"] or single, []).append(record)
    return {name: sorted(some, key=lambda r: r["compression"]) for name, some in lines.items()}


def draw_curves(panel: Any, records: Sequence[Record]) -> None:
    """Fréchet distance over tokens per forward, a line for each swept rule; the band is the noise of ar itself."""
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
