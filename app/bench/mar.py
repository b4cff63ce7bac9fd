"""The suite of continuous image models: iterations, step annealing and speculation side by side, speed and quality."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmspec import zoo
from mmspec.app.bench import quality
from mmspec.app.bench.command import BenchError, Outcome, batches, in_turn, say, seeds_of, wait
from mmspec.app.bench.quality import QualityError
from mmspec.app.bench.report import LAYOUTS, Layout, Record, figure, ratio, spread
from mmspec.app.engine import EngineError, find_device
from mmspec.app.provenance import provenance
from mmspec.zoo import classes
from mmspec.zoo.pictures import Picture
from mmspec.zoo.recipes import SCENES_MAR

NAME = "mar"  # stands for the embedded model
OWN = (NAME, SCENES_MAR.name)
SPEED, QUALITY = "mar", "mar-quality"  # the suites of the two kinds of record
KEPT, OTHER, BENT = "kept", "another", "bent"  # what becomes of the law of one token an iteration


@dataclass(frozen=True)
class Way:
    """One way to draw: arguments of the call, and of `enable_speculation` if there is any."""

    name: str
    law: str
    call: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] | None = None


@dataclass(frozen=True)
class Made:
    """What one call took and gave."""

    seconds: float
    images: list[Image.Image]
    work: dict[str, int]
    told: dict[str, float]


def draws(model: str) -> bool:
    """Whether this is a MARPipeline: the embedded one, or a folder."""
    index = Path(model) / "model_index.json"
    return model in OWN or (index.is_file() and '"MARPipeline"' in index.read_text())


def ways(tokens: int, steps: int, draft: Any) -> list[Way]:
    """Plain drawing by the head as it is defined, with all iterations and with a quarter of them; then all else."""
    some, fewer = [tokens // 4, tokens // 8, tokens // 16], max(4, steps // 5)
    found = [
        Way("all, plain head", KEPT, {"num_inference_steps": tokens, "fast_head": False}),
        Way("quarter, plain head", OTHER, {"num_inference_steps": some[0], "fast_head": False}),
        Way("all", KEPT, {"num_inference_steps": tokens}),
        *(Way(f"n={n}", OTHER, {"num_inference_steps": n}) for n in (tokens // 2, *some) if n >= 1),
        Way(f"disa {steps}-{fewer}", OTHER, {"num_diffusion_steps": (steps, fewer)}),
        Way(
            f"n={some[0]} disa", OTHER,
            {"num_inference_steps": some[0], "num_diffusion_steps": (steps, fewer)},
        ),
        *(Way(f"self-{K}", KEPT, speculation={"ahead": K}) for K in (2, 4, 8)),
    ]  # fmt: skip
    if draft is not None:
        found += [Way(f"draft-{K}", KEPT, speculation={"draft": draft, "ahead": K}) for K in (2, 4, 8)]
        cspd = {"draft": draft, "rule": "cspd", "prefill": 0.15}
        found += [Way(f"cspd-{K}", BENT, speculation={**cspd, "ahead": K}) for K in (4, 8)]
    return found


@dataclass
class Bench:
    """A pipeline and what its calls have in common."""

    pipe: Any
    settings: dict[str, Any]
    seed: int

    def call(self, way: Way, labels: Sequence[int], seeds: Sequence[int]) -> Made:
        self.pipe.disable_speculation()
        if way.speculation is not None:
            self.pipe.enable_speculation(**way.speculation)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        wait(self.pipe.transformer.device)
        began = time.perf_counter()
        arguments = {"num_inference_steps": self.pipe.transformer.tokens, **self.settings, **way.call}
        out = self.pipe(list(labels), generator=generators, **arguments)
        wait(self.pipe.transformer.device)
        return Made(time.perf_counter() - began, out.images, out.work, out.told.summary() if out.told else {})


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Timing, then quality; yields whenever the outcome has grown."""
    bench, draft = load(args)
    steps = bench.pipe.config.defaults.get("num_diffusion_steps", 100)
    chosen = [
        way
        for way in ways(bench.pipe.transformer.tokens, steps, draft)
        if not any(fnmatch(way.name, pattern) for pattern in args.without)
        and (not args.methods or way.name == "all, plain head" or any(fnmatch(way.name, p) for p in args.methods))
    ]
    model = bench.pipe.transformer
    outcome.provenance = provenance(model.device, model.dtype) | {"model": args.model, "settings": bench.settings}
    samples = classes.held_out(max(args.images, args.quality_images), 2**31 + args.seed)
    labels = [sample.label % model.config.classes for sample in samples]
    for batch in args.batch if args.images else ():
        outcome.records += timed(bench, chosen, labels[: args.images], batch)
        yield
    if args.quality_images:
        real = [classes.render(sample) for sample in samples] if args.model in OWN else []
        yield from judged(bench, chosen, labels, real, samples, args, outcome)


def load(args: argparse.Namespace) -> tuple[Bench, Any]:
    """The pipeline and, for the embedded one, its draft."""
    from mmspec.models.mar import MARTransformer2DModel
    from mmspec.models.mar_scheduler import MARScheduler
    from mmspec.pipelines.mar import MARPipeline

    own = args.model in OWN
    try:
        device = find_device(args.device)
    except EngineError as error:
        raise BenchError(str(error)) from error
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        pipe = MARPipeline.from_pretrained(zoo.path(SCENES_MAR.name) if own else args.model, torch_dtype=dtype)
        draft = MARTransformer2DModel.from_pretrained(zoo.path(SCENES_MAR.draft)) if own else None
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot load {args.model}: {error}") from error
    pipe.to(device).set_progress_bar_config(disable=True)
    if not pipe.scheduler.config.final_noise:  # for all ways alike: the exact rule needs noise at every step
        pipe.scheduler = MARScheduler.from_config(pipe.scheduler.config, final_noise=True, skip_terminal=True)
    settings = {"guidance_scale": args.guidance, "temperature": args.temperature}
    given = {name: value for name, value in settings.items() if value is not None}
    return Bench(pipe, given, args.seed), None if draft is None else draft.to(device, dtype).eval()


def timed(bench: Bench, chosen: list[Way], labels: list[int], batch: int) -> list[Record]:
    """Each way once to warm up, then all in turn on each batch of classes and seeds."""
    groups = batches(list(zip(labels, seeds_of(1, len(labels), bench.seed), strict=True)), batch)
    made: dict[str, list[Any]] = {way.name: [None] * len(groups) for way in chosen}
    for way in chosen:
        bench.call(way, *zip(*groups[0], strict=True))
    for turn, group in enumerate(groups):
        for way in (chosen[place] for place in in_turn(len(chosen), turn)):
            made[way.name][turn] = bench.call(way, *zip(*group, strict=True))
    say(f"batch {batch}: " + ", ".join(f"{n} {statistics.median(c.seconds for c in m):.2f} s" for n, m in made.items()))
    return [_speed(way, made, batch) for way in chosen]


def _speed(way: Way, made: dict[str, list[Made]], batch: int) -> Record:
    mine, pictures = made[way.name], sum(len(call.images) for call in made[way.name])

    def over(base: str) -> list[float | None]:
        return [b.seconds / m.seconds for b, m in zip(made.get(base, []), mine, strict=False)]

    work = {name: sum(call.work.get(name, 0) for call in mine) / pictures for name in
            ("passes", "rows", "evaluations", "draft_rows", "draft_evaluations")}  # fmt: skip
    tested = sum(call.told.get("tested", 0) for call in mine)

    def mean(name: str) -> float | None:
        return sum(c.told[name] * c.told["tested"] for c in mine) / tested if tested else None

    return {
        "suite": SPEED, "method": way.name, "law": way.law, "batch": batch,
        **spread("speedup_e2e", over("all, plain head")), **spread("speedup_all", over("all")),
        **spread("speedup_quarter", over("quarter, plain head")),
        **spread("seconds_per_image", [call.seconds / len(call.images) for call in mine]), **work,
        "acceptance": mean("acceptance"), "divergence": mean("divergence"), "n": len(mine), "note": "",
    }  # fmt: skip


def judged(
    bench: Bench, chosen: list[Way], labels: list[int], real: list[Image.Image], samples: list[classes.Sample],
    args: argparse.Namespace, outcome: Outcome,
) -> Iterator[None]:  # fmt: skip
    """Quality of every way but the plain head's, which draw the same pictures as the fast one."""
    try:
        features = quality.backbone(args.backbone, bench.pipe.transformer.device)
    except QualityError as error:
        raise BenchError(str(error)) from error
    reader = None
    if real:
        from mmspec.app.bench.faithful import Reader

        reader = Reader(str(bench.pipe.transformer.device))
    count, base = args.quality_images, Way("all", KEPT)
    wanted = [Picture(sample.background, (sample.thing,), None, 0) for sample in samples[:count]]

    def draw(way: Way, run: int) -> list[Image.Image]:
        asked = batches(list(zip(labels[:count], seeds_of(run, count, bench.seed), strict=True)), args.quality_batch)
        return [image for group in asked for image in bench.call(way, *zip(*group, strict=True)).images]

    reference, of_real = features(draw(base, 0)), features(real[:count]) if real else None
    noise = quality.frechet(reference, features(draw(base, 2)))
    for way in chosen:
        if way.name.endswith("plain head"):
            continue
        images = draw(way, 1)
        seen = features(images)
        facts: Record = {"suite": QUALITY, "method": way.name, "law": way.law, "n": count, "backbone": args.backbone,
                         "noise": noise, "fd_all": quality.frechet(reference, seen), "note": ""}  # fmt: skip
        facts["fd_real"] = None if of_real is None else quality.frechet(of_real, seen)
        facts |= {name: _share(reader.score(images, wanted)["facts"][name]) if reader else None
                  for name in ("colour", "shape")}  # fmt: skip
        outcome.records.append(facts)
        say(f"{way.name}: FD {facts['fd_all']:.4g} to all (noise {noise:.4g}), {facts['fd_real'] or 0:.4g} to real")
        yield


def _share(score: tuple[int, int]) -> float | None:
    right, of = score
    return right / of if of else None


LAYOUTS[SPEED] = Layout(
    lambda r: f"MAR, batch {r['batch']}",
    (
        ("method", lambda r: r["method"]),
        ("law", lambda r: r["law"]),
        ("over all, plain head", ratio("speedup_e2e")),
        ("over all", ratio("speedup_all")),
        ("over quarter, plain head", ratio("speedup_quarter")),
        ("s/image", figure("seconds_per_image", "{:.2f}")),
        ("passes", figure("passes", "{:.1f}")),
        ("rows", figure("rows", "{:.0f}")),
        ("head evaluations", figure("evaluations", "{:.0f}")),
        ("acceptance", figure("acceptance", "{:.3f}")),
        ("J", figure("divergence", "{:.2f}")),
        ("n", lambda r: str(r["n"])),
    ),
    {
        "law": "kept: that of plain drawing one token an iteration; another: a law of its own (fewer iterations, fewer "
        "denoising steps); bent: approximate",
        "speedup_e2e": "wall time per picture of plain drawing with one token an iteration and the head as it is "
        "defined, over that of the method; median over calls side by side, same classes and seeds, with quartiles",
        "speedup_all": "the same over plain drawing with one token an iteration and the fast head",
        "speedup_quarter": "the same over plain drawing with a quarter of the iterations and the head as it is defined",
        "passes": "forwards of the target's trunk per picture, shared by the batch; rows: pictures (and their "
        "unguided twins) in them; evaluations: tokens times steps that the head was asked at",
        "acceptance": "mean chance of tested drafts to be kept; divergence (J): their mean log Q/P over whole paths",
    },
)
LAYOUTS[QUALITY] = Layout(
    lambda r: f"MAR, quality of {r['n']} pictures, {r['backbone']}",
    (
        ("method", lambda r: r["method"]),
        ("law", lambda r: r["law"]),
        ("FD to all", figure("fd_all", "{:.3g}")),
        ("noise", figure("noise", "{:.3g}")),
        ("FD to real", figure("fd_real", "{:.3g}")),
        ("colour", figure("colour", "{:.0%}")),
        ("shape", figure("shape", "{:.0%}")),
    ),
    {
        "fd_all": "Fréchet distance of features to a reference run of `all`, same classes and other seeds; noise: "
        "that of another run of it. Biased upwards at small n: compare at equal n only",
        "fd_real": "the same to drawn scenes of these classes",
        "colour": "share of pictures whose colour the embedded VLM reads as the class says; shape likewise",
    },
)
