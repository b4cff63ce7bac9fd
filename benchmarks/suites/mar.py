"""The suite for continuous image models: speed, and quality measured on many pictures per method."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.suites.gallery import Gallery
from benchmarks.suites.quality import EMBEDDED, ImagePrompts, Judge
from benchmarks.zoo import classes
from mmspec.app.bench.command import Outcome, batches, matching, say, seeds_of
from mmspec.app.bench.report import Record, spread
from mmspec.app.compare import Comparison, Method, over
from mmspec.app.image_model import OWN_MARS, MarSubject, load_mar
from mmspec.app.painter import ImageResult
from mmspec.app.provenance import provenance
from mmspec.config import Options

HELD_OUT = 2**31  # first seed of the classes; training uses lower ones
SPEED, QUALITY = "mar", "mar-quality"  # the suites of its records
DRAFT = "draft"  # the embedded one
KEPT, OTHER, BENT = "kept", "another", "bent"  # effect on the distribution of one token per iteration


def mar(name: str, distribution: str, call: Options = {}, speculation: Options | None = None) -> Method:  # noqa: B006
    """One method: arguments of the call, and of `enable_speculation` if it speculates."""
    drafter = None if speculation is None else "speculation"
    return Method(name, drafter, speculation or {}, call, {"distribution": distribution})


def ways(tokens: int, steps: int, drafts: Mapping[str, object]) -> list[Method]:
    """All methods: first plain drawing by the reference head, with all iterations and with a quarter of them.

    Args:
        drafts: smaller models by name.
    """
    some, fewer = [tokens // 4, tokens // 8, tokens // 16], max(4, steps // 5)
    methods = [
        mar("all, plain head", KEPT, {"num_inference_steps": tokens, "fast_head": False}),
        mar("quarter, plain head", OTHER, {"num_inference_steps": some[0], "fast_head": False}),
        mar("all", KEPT, {"num_inference_steps": tokens}),
        *(mar(f"n={n}", OTHER, {"num_inference_steps": n}) for n in (tokens // 2, *some) if n >= 1),
        mar(f"disa {steps}-{fewer}", OTHER, {"num_diffusion_steps": (steps, fewer)}),
        mar(
            f"n={some[0]} disa", OTHER,
            {"num_inference_steps": some[0], "num_diffusion_steps": (steps, fewer)},
        ),
        *(mar(f"self-{K}", KEPT, speculation={"ahead": K}) for K in (2, 4, 8)),
    ]  # fmt: skip
    for name, draft in drafts.items():
        mark = "" if name == DRAFT else f" {name}"
        methods += [mar(f"draft-{K}{mark}", KEPT, speculation={"draft": draft, "ahead": K}) for K in (2, 4, 8)]
        cspd = {"draft": draft, "rule": "cspd", "prefill": 0.15}  # as published, with its two schedules
        methods += [mar(f"cspd-{K}{mark}", BENT, speculation={**cspd, "ahead": K}) for K in (4, 8)]
        fewer_too = {"num_inference_steps": some[0]}
        methods += [mar(f"cspd-8{mark} n={some[0]}", BENT, fewer_too, {**cspd, "ahead": 8})]
    compiled = {"all", f"n={some[0]}", "self-4", "self-8", "draft-4"}
    return methods + [
        replace(way, name=f"{way.name}, compiled", arguments={**way.arguments, "compile": True})
        for way in methods
        if way.name in compiled
    ]


def call(model: MarSubject, way: Method, labels: Sequence[int], seeds: Sequence[int]) -> ImageResult:
    model.go(way)
    return model.paint(labels, seeds, **way.arguments)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Measure times, then quality; yields whenever the outcome has grown."""
    bench = load_mar(args.model, args.device, args.dtype, guidance_scale=args.guidance, temperature=args.temperature)
    drafts = {DRAFT: bench.draft} if bench.draft is not None else {}
    if args.drafters:
        drafts = {Path(name).name: bench.small(name) for name in args.drafters}
    note = bench.singly()
    if note:
        say(note)
    steps = bench.pipe.config.defaults.get("num_diffusion_steps", 100)
    chosen = matching(ways(bench.tokens, steps, drafts), args.methods, args.without)
    model = bench.pipe.transformer
    outcome.provenance = provenance(model.device, model.dtype) | {"model": args.model, "settings": bench.settings}
    outcome.provenance["sampler"] = note or "the model's own"
    samples = classes.held_out(max(args.images, args.quality_images), HELD_OUT + args.seed)
    labels = [sample.label % model.config.classes for sample in samples]
    for batch in args.batch if args.images else ():
        outcome.records += timed(bench, chosen, labels[: args.images], batch, args.seed)
        yield
    if args.quality_images:
        yield from judged(samples, labels, args, outcome, bench, chosen)


def timed(bench: MarSubject, chosen: list[Method], labels: list[int], batch: int, seed: int) -> list[Record]:
    """Warm up each method, then run all in turn on each batch of classes and seeds."""
    groups = batches(list(zip(labels, seeds_of(1, len(labels), seed), strict=True)), batch)
    comparison: Comparison[list[tuple[int, int]], ImageResult] = Comparison(
        chosen, lambda way, group: call(bench, way, *zip(*group, strict=True))
    )
    comparison.warm_up(groups[0], [chosen[0].name])
    made = comparison.measure(groups)
    say(f"batch {batch}: " + ", ".join(f"{n} {statistics.median(c.seconds for c in m):.2f} s" for n, m in made.items()))
    return [_speed(way, made, batch) | {"note": comparison.notes.get(way.name, "")} for way in chosen]


def _speed(way: Method, made: dict[str, list[ImageResult]], batch: int) -> Record:
    mine = made.get(way.name, [])
    pictures = sum(len(call.images) for call in mine)
    work = {name: sum(call.work.get(name, 0) for call in mine) / pictures if pictures else None for name in
            ("passes", "rows", "evaluations", "draft_rows", "draft_evaluations")}  # fmt: skip
    tested = sum(call.stats.get("tested", 0) for call in mine)

    def mean(name: str) -> float | None:
        return sum(c.stats[name] * c.stats["tested"] for c in mine) / tested if tested else None

    return {
        "suite": SPEED, "method": way.name, **way.facts, "batch": batch,
        "stock_path": way.name.endswith("plain head"),
        **spread("speedup_e2e", over(made["all, plain head"], mine)),
        **spread("speedup_all", over(made.get("all", []), mine)),
        **spread("speedup_quarter", over(made.get("quarter, plain head", []), mine)),
        **spread("seconds_per_image", [call.seconds / len(call.images) for call in mine]), **work,
        "acceptance": mean("acceptance"), "divergence": mean("divergence"), "n": len(mine),
    }  # fmt: skip


def judged(
    samples: list[classes.Sample], labels: list[int], args: argparse.Namespace, outcome: Outcome, bench: MarSubject,
    chosen: list[Method],
) -> Iterator[None]:  # fmt: skip
    """The quality of every method, except those that draw the pictures of another (plain head, compiled)."""
    count, size = args.quality_images, args.quality_batch
    real = [classes.render(sample) for sample in samples[:count]] if args.model in OWN_MARS else []
    scenes = [sample.picture for sample in samples[:count]] if real else []

    def draw(way: Method, run: int) -> Gallery:
        asked = list(zip(labels[:count], seeds_of(run, count, args.seed), strict=True))
        groups = [asked[first : first + size] for first in range(0, count, size)]
        return Gallery([image for group in groups for image in call(bench, way, *zip(*group, strict=True)).images])

    asked, device = ImagePrompts(labels[:count], scenes, real), bench.pipe.transformer.device
    judge = Judge(partial(draw, mar("all", KEPT)), (0, 2), asked, device)
    (noise,) = judge.noise
    for way in chosen:
        if way.name.endswith(("plain head", "compiled")):
            continue
        _, distance, of_real, read = judge.look(draw(way, 1).images)
        shares = {name: _share(read["facts"][name]) if read else None for name in ("colour", "shape")}
        outcome.records.append({
            "suite": QUALITY, "method": way.name, **way.facts, "n": count,
            "backbone": EMBEDDED, "noise": noise, "fd_all": distance, "note": "", "fd_real": of_real, **shares,
        })  # fmt: skip
        say(f"{way.name}: FD {distance:.4g} to all (noise {noise:.4g}), {of_real or 0:.4g} to real")
        yield


def _share(score: tuple[int, int]) -> float | None:
    right, of = score
    return right / of if of else None
