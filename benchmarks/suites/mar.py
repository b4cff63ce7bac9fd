"""The suite for continuous image models: speed, and quality measured on many pictures per method."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from benchmarks.suites import mar_ways
from benchmarks.suites.gallery import Gallery
from benchmarks.suites.judge import ImagePrompts, Judge
from benchmarks.suites.mar_ways import BENT, HELD_OUT, KEPT, OTHER, SPEED, call
from benchmarks.suites.plots import CURVES
from benchmarks.zoo import classes
from mmspec.app.bench.command import Outcome, say, seeds_of
from mmspec.app.bench.report import Record
from mmspec.app.compare import Method
from mmspec.app.image_model import OWN_MARS, MarSubject

QUALITY = "mar-quality"  # the suite of its records


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    samples = classes.held_out(max(args.images, args.quality_images), HELD_OUT + args.seed)
    further = partial(judged, samples, args, outcome) if args.quality_images else None
    yield from mar_ways.measure(args, outcome, [sample.label for sample in samples], further)


def judged(
    samples: list[classes.Sample],
    args: argparse.Namespace,
    outcome: Outcome,
    bench: MarSubject,
    chosen: list[Method],
) -> Iterator[None]:
    """The quality of every method, except those that draw the pictures of another (plain head, compiled)."""
    count, size = args.quality_images, args.quality_batch
    labels = [sample.label % bench.pipe.transformer.config.classes for sample in samples]
    real = [classes.render(sample) for sample in samples[:count]] if args.model in OWN_MARS else []
    scenes = [sample.picture for sample in samples[:count]] if real else []

    def draw(way: Method, run: int) -> Gallery:
        asked = list(zip(labels[:count], seeds_of(run, count, args.seed), strict=True))
        groups = [asked[first : first + size] for first in range(0, count, size)]
        return Gallery([image for group in groups for image in call(bench, way, *zip(*group, strict=True)).images])

    asked, device = ImagePrompts(labels[:count], scenes, real), bench.pipe.transformer.device
    judge = Judge(partial(draw, mar_ways.mar("all", KEPT)), (0, 2), asked, args.backbone, device)
    (noise,) = judge.noise
    for way in chosen:
        if way.name.endswith(("plain head", "compiled")):
            continue
        _, distance, of_real, read = judge.look(draw(way, 1).images)
        shares = {name: _share(read["facts"][name]) if read else None for name in ("colour", "shape")}
        outcome.records.append({
            "suite": QUALITY, "method": way.name, **way.facts, "n": count,
            "backbone": args.backbone, "noise": noise, "fd_all": distance, "note": "", "fd_real": of_real, **shares,
        })  # fmt: skip
        say(f"{way.name}: FD {distance:.4g} to all (noise {noise:.4g}), {of_real or 0:.4g} to real")
        yield


def _share(score: tuple[int, int]) -> float | None:
    right, of = score
    return right / of if of else None


def draw_curves(panel: Any, records: Sequence[Record]) -> None:
    """Plot Fréchet distance over seconds per picture at the smallest batch, a mark per method; the line is noise."""
    speeds = sorted((r for r in records if r["suite"] == SPEED), key=lambda r: -r["batch"])
    seconds = {r["method"]: r["seconds_per_image"] for r in speeds}
    for distribution, mark in ((KEPT, "^"), (OTHER, "o-"), (BENT, "x")):
        some = [
            (seconds[r["method"]], r["fd_all"], r["method"])
            for r in records
            if r["suite"] == QUALITY and r["distribution"] == distribution and r["method"] in seconds
        ]
        some.sort(key=itemgetter(0))
        took, distances = [one[0] for one in some], [one[1] for one in some]
        panel.plot(took, distances, mark, label=f"distribution: {distribution}", markersize=4, linewidth=0.8)
        for x, y, name in some:
            panel.annotate(name, (x, y), fontsize=6)
    noise = next((r["noise"] for r in records if r["suite"] == QUALITY), None)
    if noise is not None:
        panel.axhline(noise, color="#9aa3ad", label="two runs of all")
    panel.set_xlabel("seconds a picture", fontsize=9)
    panel.set_ylabel("Fréchet distance to all", fontsize=9)
    panel.legend(fontsize=7)


CURVES[QUALITY] = draw_curves
