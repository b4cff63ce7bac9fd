"""The image suite: all methods draw the same prompts in turn, and each call is timed."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from mmspec.app import embedded, enabling
from mmspec.app.bench import drafters, report
from mmspec.app.bench.command import BenchError, Outcome, batches, matching, say, seeds_of
from mmspec.app.bench.image_methods import PLAIN, facts, lossless, relaxed
from mmspec.app.bench.image_model import load
from mmspec.app.bench.image_plain import ImageBench
from mmspec.app.bench.report import Record, spread
from mmspec.app.compare import Comparison, Method, over
from mmspec.app.mar import draws
from mmspec.app.options import count, from_zero, where
from mmspec.app.painter import ImageResult, ImageSubject, together
from mmspec.app.prompt import PromptError, read_prompts
from mmspec.app.provenance import provenance
from mmspec.zoo import pictures

HELD_OUT = 2**31  # first seed of prompts that no training uses
SPEED = "image"  # the suite of these records


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
    add("--images", type=count, default=12, help="prompts timed side by side (%(default)s)")
    add("--batch", type=count, nargs="+", default=[1, 4], help="pictures per timed call (default: 1 4)")
    add("--methods", nargs="+", metavar="PATTERN", help="ar and only these, such as 'jacobi-*' '*+scaled'")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as ar-compiled")
    add("--rule", nargs="+", default=[], metavar="SPEC", help="further rules, such as 'lantern(k=20, lam=1.2)'")
    add("--budget", type=float, help="limit of a relaxed rule's cost per picture, in total variation")
    add("--guidance", type=float)
    add("--top-k", type=int)
    add("--temperature", type=from_zero)
    add("--image-area", type=count, metavar="N", help="pixels of an Emu3's pictures (default: its processor's)")
    where(parser)
    add("--seed", type=int, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Time the methods at each batch size; yields whenever the outcome has new records."""
    yield from timings(begin(args, outcome), args, outcome)


def begin(args: argparse.Namespace, outcome: Outcome) -> ImageBench:
    """Load the model, and describe the run."""
    if draws(args.model):
        raise BenchError(
            f"{args.model} is a MAR: `mmspec generate --model {args.model} --compare` prints its speed, and in a clone "
            "`python -m benchmarks image` measures all its methods"
        )
    settings = {"guidance_scale": args.guidance, "top_k": args.top_k, "temperature": args.temperature}
    painter = load(args.model, args.device, args.dtype, **settings, image_area=args.image_area)
    about = {"model": args.model, "settings": painter.settings, "seed": args.seed, "budget": args.budget}
    outcome.provenance = provenance(painter.model.device, painter.model.dtype) | about
    return ImageBench(painter, args.seed)


Methods = Callable[[ImageSubject, argparse.Namespace], list[Method]]


def methods(painter: ImageSubject, args: argparse.Namespace) -> list[Method]:
    trained, given = drafters.read(args, trained=True, model=painter.model), enabling.given(args.enable)
    named = [(name, drafter) for name, drafter in trained.items()]
    known = [*lossless(named), *relaxed(painter.codes, named, args.rule, args.budget)]
    return [
        Method(m.name, m.drafter, {**m.options, **given}, m.arguments, m.facts) if m.drafter in trained.values() else m
        for m in known
        if painter.static or not m.arguments
    ]


def timings(
    bench: ImageBench, args: argparse.Namespace, outcome: Outcome, methods: Methods = methods
) -> Iterator[None]:
    """Time the chosen methods at each batch size."""
    chosen = matching(methods(bench.painter, args), args.methods, args.without)
    conditions = prompts(bench.painter, args, args.images)
    gc.freeze()  # so that the garbage collections before the calls skip loaded objects
    try:
        for batch in args.batch:
            records = timed(bench, chosen, conditions, batch)
            outcome.records += records
            say(f"batch {batch}: " + ", ".join(f"{r['method']} {r['speedup_e2e']:.2f}x" for r in records if r["n"]))
            yield
    finally:
        gc.unfreeze()


def prompts(painter: ImageSubject, args: argparse.Namespace, count: int) -> Sequence[str | int]:
    """The user's prompts, repeated as needed; or random classes, or prompts of held-out scenes."""
    if args.prompts is not None:
        try:
            lines = read_prompts(args.prompts)
        except PromptError as error:
            raise BenchError(str(error)) from error
        if painter.classes:
            raise BenchError(f"{args.model} draws classes, not prompts; leave --prompts out")
        return [lines[i % len(lines)] for i in range(count)]
    if painter.classes:
        return np.random.default_rng([HELD_OUT, args.seed]).integers(painter.classes, size=count).tolist()
    return [caption for _, caption in pictures.held_out(count, HELD_OUT + args.seed)]


def timed(bench: ImageBench, chosen: list[Method], prompts: Sequence[str | int], batch: int) -> list[Record]:
    """Warm each method up, then time all of them in turn on each batch."""
    torch.compiler.reset()  # code compiled for other lengths counts toward the recompilation limit
    groups = batches(list(zip(prompts, seeds_of(1, len(prompts), bench.seed), strict=True)), batch)
    comparison = Comparison(chosen, bench.call)
    # host reads of compiled code cannot be counted
    comparison.warm_up(groups[0], ["ar"], read=lambda method: not method.arguments)
    results = comparison.measure(groups)
    best = report.fastest(results, PLAIN, "seconds")
    slower = {name: f"slower than {best} here" for name in PLAIN if name in results and name != best}
    return [
        {"suite": SPEED, "batch": batch}
        | facts(m)
        | figures(m.name, results, best, comparison.reads.get(m.name))
        | {"note": comparison.notes.get(m.name, slower.get(m.name, ""))}
        for m in chosen
    ]


def figures(name: str, calls: dict[str, list[ImageResult]], best: str, reads: int | None = None) -> Record:
    """The figures of one method from its timed calls; None for those that do not apply.

    Args:
        calls: of every method, on the same prompts and seeds in the same order.
        best: the plain path for `speedup_vs_best_plain`.
        reads: how often one call read values of tensors to the host, if that was counted.
    """
    own, plain = calls.get(name, []), calls["ar"]
    whole = together(own) if own else None
    stats = report.total(own)
    parts = {part: stats.seconds.get(part, 0.0) for part in ("draft", "verify")}
    parts["other"] = sum(much for part, much in stats.seconds.items() if part not in (*parts, "prefill"))
    same = [torch.equal(a, b) for m, p in zip(own, plain, strict=False)
            for a, b in zip(m.tokens, p.tokens, strict=True)]  # fmt: skip
    cost = spread("c", over(own, plain, "round_seconds"))
    return {
        "best_plain": best,
        "stock_path": name in PLAIN,
        **spread("speedup_e2e", over(plain, own)),
        **spread("speedup_decode", over(plain, own, "decode_seconds")),
        **spread("speedup_vs_best_plain", over(calls[best], own)),
        **cost,
        **spread("seconds_per_image", [c.seconds / len(c.images) for c in own]),
        "forwards": whole and whole.forwards,
        "compression": whole and whole.compression,
        "tokens_per_target_call": stats.tokens_per_target_call if own else None,
        "limit": whole.compression / cost["c"] if whole and cost["c"] else None,
        "acceptance_by_depth": report.acceptance_by_depth(stats),
        "shares": {part: s / sum(parts.values()) for part, s in parts.items()} if sum(parts.values()) else None,
        "seconds": {part: s / len(whole.images) for part, s in stats.seconds.items()} if whole else {},
        "identical_rate": statistics.fmean(same) if same else None,
        **charges(whole.spent if whole else (), own[0].tokens[0].numel() if own else 1),
        "reads": reads,
        "n": len(own),
    }


def charges(spent: Sequence[float], tokens: int) -> Record:
    """Mean and largest total-variation cost per picture, and the mean per token."""
    mean = statistics.fmean(spent) if spent else None
    return {
        "spent": mean,
        "spent_max": max(spent, default=None),
        "spent_per_token": None if mean is None else mean / tokens,
    }
