"""The image suite: all methods draw the same prompts in turn, and each call is timed."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mmspec.app import embedded, enabling
from mmspec.app.bench import drafters, gallery, measures, report_image
from mmspec.app.bench.command import BenchError, Outcome, batches, matching, say, seeds_of
from mmspec.app.bench.image_methods import Hostile, ImageMethod, lossless, relaxed
from mmspec.app.bench.image_model import load
from mmspec.app.bench.image_plain import ImageBench
from mmspec.app.bench.pictures import prompts_of
from mmspec.app.bench.report import Record
from mmspec.app.compare import Comparison
from mmspec.app.devices import EngineError
from mmspec.app.mar import draws
from mmspec.app.options import count, from_zero, where
from mmspec.app.painter import ImageSubject, sheet
from mmspec.app.provenance import provenance
from mmspec.zoo import pictures

HELD_OUT = 2**31  # first seed of prompts that no training uses
GRID = 8  # pictures per method on the sheet
Further = Callable[[ImageBench, argparse.Namespace, Outcome], Iterator[None]]  # measures more after the timings


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        default=embedded.IMAGE_MODEL,
        help="folder or name on the Hub of a LlamaGenPipeline, a Janus, an Emu3 or a diffusers pipeline, or a Python "
        "file of your own with `load` and `draw` (%(default)s)",
    )
    drafters.configure(parser)
    add("--prompts", type=Path, metavar="FILE", help="your own prompts, one per line, or the captions of COCO "
        "(.json) (default: held-out scenes)")  # fmt: skip
    add("--images", type=int, default=12, help="prompts timed side by side; 0: no timing (%(default)s)")
    add("--batch", type=count, nargs="+", default=[1, 4], help="pictures per timed call (default: 1 4)")
    add("--methods", nargs="+", metavar="PATTERN", help="ar and only these, such as 'jacobi-*' '*+scaled'")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as ar-compiled")
    add("--rule", nargs="+", default=[], metavar="SPEC", help="further rules, such as 'lantern(k=20, lam=1.2)'")
    add("--budget", type=float, help="limit of a relaxed rule's cost per picture, in total variation")
    add("--guidance", type=float)
    add("--top-k", type=int)
    add("--temperature", type=from_zero)
    add("--image-area", type=count, metavar="N", help="pixels of an Emu3's pictures (default: its processor's)")
    parser.add_argument("--grid", type=Path, metavar="FILE", help="a sheet of pictures, all methods at the same seeds")
    parser.add_argument("--resume", action="store_true", help="continue with the records of an earlier run's --json")
    where(parser)
    add("--seed", type=int, default=0)
    measures.configure(parser)
    good = parser.add_argument_group("quality")
    good.add_argument("--quality-images", type=int, default=0, metavar="N", help="pictures to measure per method")
    good.add_argument("--quality-batch", type=count, default=8, metavar="N", help="pictures per call (%(default)s)")
    good.add_argument("--pictures", type=Path, metavar="FOLDER", help="keep the pictures here; a second run resumes")


def measure(args: argparse.Namespace, outcome: Outcome, further: Further | None = None) -> Iterator[None]:
    """Timings, then the sheet, then quality and `further`; yields whenever the outcome has new records."""
    if draws(args.model):
        raise BenchError(
            f"{args.model} is a MAR: `mmspec generate --model {args.model} --compare` prints its speed, and in a clone "
            "`python -m benchmarks image` measures all its methods"
        )
    measured = measures.wanted(args)
    if measured and args.quality_images < 2:
        raise BenchError("give the number of pictures to measure: --quality-images N, 2 or more")
    if args.quality_images and not measured and further is None:
        raise BenchError("--quality-images needs a measure; add --clip or --inception")
    if args.images == 0 and args.grid is None and further is None and not measured:
        raise BenchError("nothing to do; give --images, --grid, --clip or --inception")
    settings = {"guidance_scale": args.guidance, "top_k": args.top_k, "temperature": args.temperature}
    settings |= {"image_area": args.image_area}
    bench = ImageBench(load(args.model, args.device, args.dtype, **settings), args.seed)
    facts = {"model": args.model, "settings": bench.painter.settings, "seed": args.seed, "budget": args.budget}
    outcome.provenance = provenance(bench.painter.device, bench.painter.dtype) | facts
    if args.resume:
        take_up(args.json, outcome, facts)
    gc.freeze()  # so that the garbage collections before the calls skip loaded objects
    try:
        chosen = matching(methods(bench.painter, args), args.methods, args.without)
        conditions = prompts(bench.painter, args, max(args.images, GRID if args.grid else 0))
        for batch in args.batch if args.images else ():
            records = timed(bench, chosen, conditions[: args.images], batch, outcome.records)
            outcome.records += records
            speeds = [f"{r['method']} {r['speedup_e2e']:.2f}x" for r in records if r["speedup_e2e"]]
            say(f"batch {batch}: {', '.join(speeds) or 'measured before'}")
            yield
        if args.grid:
            draw_sheet(bench, chosen, conditions[:GRID], args.grid)
            yield
        if measured:
            yield from measure_pictures(bench, chosen, args, outcome)
        if further is not None:
            yield from further(bench, args, outcome)
    finally:
        gc.unfreeze()


def methods(painter: ImageSubject, args: argparse.Namespace) -> list[ImageMethod]:
    trained = list(drafters.read(args, trained=True, model=painter.model).items())
    known = lossless(trained) + relaxed(painter.codes, trained, args.rule, args.budget)
    if not painter.static:
        known = [m for m in known if not m.plain and not isinstance(m.way.drafter, Hostile)]
    given, named = enabling.given(args.enable), [drafter for _, drafter in trained]
    return [replace(m, way=replace(m.way, options={**m.way.options, **given})) if m.way.drafter in named else m
            for m in known]  # fmt: skip


def prompts(painter: ImageSubject, args: argparse.Namespace, count: int) -> Sequence[str | int]:
    """The user's prompts, repeated as needed; or random classes, or prompts of held-out scenes."""
    if args.prompts is not None:
        lines = prompts_of(args.prompts)
        if painter.classes:
            raise BenchError(f"{args.model} draws classes, not prompts; leave --prompts out")
        return [lines[i % len(lines)] for i in range(count)]
    if painter.classes:
        return np.random.default_rng([HELD_OUT, args.seed]).integers(painter.classes, size=count).tolist()
    return [caption for _, caption in pictures.held_out(count, HELD_OUT + args.seed)]


def take_up(path: Path | None, outcome: Outcome, facts: Record) -> None:
    """Add the records of an earlier run to the outcome. BenchError if it had other settings."""
    if path is None:
        raise BenchError("--resume continues a file of records; name it with --json")
    if not path.is_file():
        return
    earlier = json.loads(path.read_text())
    here = outcome.provenance
    other = [n for n in (*facts, "device", "dtype", "commit") if earlier["provenance"].get(n) != here.get(n)]
    if other:
        was, now = (str(values.get(other[0])) for values in (earlier["provenance"], here))
        raise BenchError(f"{path} was measured with {other[0]} {was}, this run has {now}; leave --resume out")
    outcome.records += earlier["records"]
    before = earlier["provenance"].pop("earlier", [])
    outcome.provenance["earlier"] = [*before, earlier["provenance"]]  # the origin of the earlier records


def there(records: list[Record], **facts: object) -> bool:
    return any(all(record.get(name) == value for name, value in facts.items()) for record in records)


def timed(
    bench: ImageBench, chosen: list[ImageMethod], prompts: Sequence[str | int], batch: int, before: list[Record]
) -> list[Record]:
    """Warm each method up, then time all of them in turn on each batch; no records if all are there already."""
    if all(there(before, suite=report_image.SPEED, batch=batch, method=m.name) for m in chosen):
        return []
    torch.compiler.reset()  # code compiled for other lengths counts toward the recompilation limit
    before[:] = [r for r in before if (r["suite"], r.get("batch")) != (report_image.SPEED, batch)]
    groups = batches(list(zip(prompts, seeds_of(1, len(prompts), bench.seed), strict=True)), batch)
    comparison = Comparison(chosen, bench.call)
    comparison.warm_up(groups[0], ["ar"], read=lambda method: not method.plain)  # compiled reads cannot be counted
    results = comparison.measure(groups)
    best = report_image.fastest(results)
    slower = {name: f"slower than {best} here" for name in report_image.PLAIN if name in results and name != best}
    facts = {"suite": report_image.SPEED, "batch": batch}
    return [
        facts
        | m.facts
        | report_image.figures(m.name, results, best, comparison.reads.get(m.name))
        | {"note": comparison.notes.get(m.name, slower.get(m.name, ""))}
        for m in chosen
    ]


def draw_sheet(bench: ImageBench, chosen: list[ImageMethod], prompts: Sequence[str | int], path: Path) -> None:
    """Write a sheet with a row per method, and the same prompt and seed in each column."""
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


def measure_pictures(
    bench: ImageBench, chosen: Sequence[ImageMethod], args: argparse.Namespace, outcome: Outcome
) -> Iterator[None]:
    """Draw many pictures with each method and measure their quality; methods with records are skipped."""
    if args.clip and bench.painter.classes:
        raise BenchError(f"--clip compares with prompts, and {args.model} draws classes; leave it out")
    ways = [m for m in chosen if not m.plain]
    left = [m for m in ways if not there(outcome.records, suite=measures.SUITE, n=args.quality_images, method=m.name)]
    if not left:
        return
    networks = measures.Measures(args, bench.painter.device)
    conditions = prompts(bench.painter, args, args.quality_images)
    for method in left:
        facts: Record = {"suite": measures.SUITE, "n": len(conditions), **method.facts, **measures.NOTHING, "note": ""}
        try:
            drawn = gallery_of(bench, method, 1, conditions, args)
            facts |= networks(drawn.images, None if bench.painter.classes else [*map(str, conditions)])
            facts |= {"compression": drawn.compression, "seconds_per_image": drawn.seconds / len(conditions)}
        except EngineError as error:
            facts["note"] = f"failed: {str(error)[:200]}"
        outcome.records.append(facts)
        yield


def gallery_of(
    bench: ImageBench, method: ImageMethod, run: int, conditions: Sequence[str | int], args: argparse.Namespace
) -> gallery.Gallery:
    """The pictures of a method's run, one per prompt, drawn or read from the folder of --pictures."""
    bench.go(method)
    keep = None if args.pictures is None else args.pictures / gallery.slug(method.name, run)
    facts = {"setting": method.setting, "settings": bench.painter.settings, "model": args.model}
    seeds = seeds_of(run, len(conditions), bench.seed)
    return gallery.fill(bench.painter, conditions, seeds, args.quality_batch, keep, facts)
