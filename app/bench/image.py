"""The image suite: all methods draw the same prompts in turn, and each call is timed."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mmspec.app import embedded, enabling
from mmspec.app.bench import drafters, report
from mmspec.app.bench.command import BenchError, Outcome, batches, matching, say, seeds_of
from mmspec.app.bench.report import Record, spread
from mmspec.app.compare import Comparison, Method, over
from mmspec.app.devices import wait
from mmspec.app.image_model import is_mar, load
from mmspec.app.options import count, from_zero, seed_value, where
from mmspec.app.painter import ImageResult, ImageSubject, together
from mmspec.app.prompt import read_prompts
from mmspec.app.provenance import provenance
from mmspec.zoo import pictures

HELD_OUT = 2**31  # first seed of prompts that no training uses
SPEED = "image"  # the suite of these records
PLAIN = ("ar", "ar-static", "ar-compiled")  # the pipeline's own loop; the maintainers' suite has loops of fixed shapes
BASE = {"window": 16, "coupling": "maximal"}  # the Jacobi drafter of every relaxed rule


@dataclass
class ImageBench:
    """The model, and the seed of a run."""

    painter: ImageSubject
    seed: int

    def go(self, method: Method) -> None:
        self.painter.go(method)

    def call(self, method: Method, group: Sequence[tuple[str | int, int]]) -> ImageResult:
        """One timed call for (prompt, seed) pairs."""
        self.go(method)
        gc.collect()
        wait(self.painter.model.device)
        return self.painter.paint([prompt for prompt, _ in group], [seed for _, seed in group])


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        default=embedded.IMAGE_MODEL,
        help="folder or name on the Hub of a LlamaGenPipeline, a Janus, an Emu3 or a diffusers pipeline, or a Python "
        "file of your own with `load` and `draw` (%(default)s)",
    )
    drafters.configure(parser)
    add("--prompts", type=read_prompts, metavar="FILE", help="your own, one per line (default: held-out scenes)")
    add("--images", type=count, default=12, help="prompts timed side by side (%(default)s)")
    add("--batch", type=count, nargs="+", default=[1, 4], help="pictures per timed call (default: 1 4)")
    add("--methods", nargs="+", metavar="PATTERN", help="ar and only these, such as 'jacobi-*' 'eagle*'")
    add("--without", nargs="+", default=[], metavar="PATTERN", help="leave these out, such as 'jacobi-none*'")
    add("--rule", nargs="+", default=[], metavar="SPEC", help="relaxed rules to measure, such as 'scaled(omega=1.5)'")
    add("--budget", type=float, help="limit of a relaxed rule's cost per picture, in total variation")
    add("--guidance", type=float)
    add("--top-k", type=int)
    add("--temperature", type=from_zero)
    add("--image-area", type=count, metavar="N", help="pixels of pictures of an Emu3 or a diffusers pipeline")
    where(parser)
    add("--seed", type=seed_value, default=0)


def measure(args: argparse.Namespace, outcome: Outcome) -> Iterator[None]:
    """Time the methods at each batch size; yields whenever the outcome has new records."""
    yield from timings(begin(args, outcome), args, outcome)


def begin(args: argparse.Namespace, outcome: Outcome) -> ImageBench:
    """Load the model, and describe the run."""
    if is_mar(args.model):
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
    """Plain decoding, Jacobi drafts, the drafters, and each rule of --rule with all of these."""
    if args.budget is not None and not args.rule:
        raise BenchError("--budget limits the rules that --rule names; name one")
    for rule in args.rule:
        enabling.given([f"rule={rule}"])  # an error now, not after the measurement
    given, exact = enabling.given(args.enable), {"reproducible": True}
    drafted = [Method(f"jacobi-{kind}-16", "jacobi", {**BASE, "coupling": kind}) for kind in ("none", "maximal")]
    seeded = [Method(f"jacobi-exact-seed-{window}", "jacobi", {"window": window, **exact}) for window in (16, 32)]
    seeded.append(Method("jacobi-exact-seed-16-compiled", "jacobi", {"window": 16, **exact, "compile": True}))
    for name, drafter in drafters.read(args, painter.model).items():
        if not fills_windows(name):
            drafted.append(Method(name, drafter, given))
        seeded.append(Method(f"{name}-exact-seed", drafter, {**exact, **given}))
    relaxed = [with_rule(f"{m.name}+{spec}", m, spec, args.budget) for spec in args.rule for m in drafted]
    return [Method(PLAIN[0]), *drafted, *seeded, *relaxed]


def fills_windows(name: str) -> bool:
    """Whether it is heads, which fill windows and have no lossless rule of their own; the others draft trees."""
    return name.partition(":")[0] == "heads"


def with_rule(name: str, base: Method, spec: str, budget: float | None) -> Method:
    """The method with a rule."""
    limit = {} if budget is None else {"budget": budget}
    return replace(base, name=name, options={**base.options, "rule": spec, **limit})


def facts(method: Method) -> Record:
    """What the records say of a method."""
    plain = method.drafter is None
    return {
        "method": method.name, "lossless": str(method.options.get("rule", "exact")) == "exact",
        "exact_seed": plain or bool(method.options.get("reproducible")), "setting": method.setting,
    }  # fmt: skip


def timings(
    bench: ImageBench, args: argparse.Namespace, outcome: Outcome, methods: Methods = methods
) -> Iterator[None]:
    """Time the chosen methods at each batch size."""
    chosen = matching(methods(bench.painter, args), args.methods, args.without)
    if args.rule and not any("rule" in method.options for method in chosen):
        raise BenchError("--methods leaves out every rule of --rule; name these, too, as 'jacobi-maximal-16*' does")
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
        if painter.classes:
            raise BenchError(f"{args.model} draws classes, not prompts; leave --prompts out")
        return [args.prompts[i % len(args.prompts)] for i in range(count)]
    if painter.classes:
        return np.random.default_rng([HELD_OUT, args.seed]).integers(painter.classes, size=count).tolist()
    return [caption for _, caption in pictures.held_out(count, HELD_OUT + args.seed)]


def timed(bench: ImageBench, chosen: list[Method], prompts: Sequence[str | int], batch: int) -> list[Record]:
    """Warm each method up, then time all of them in turn on each batch."""
    torch.compiler.reset()  # code compiled for other lengths counts toward the recompilation limit
    groups = batches(list(zip(prompts, seeds_of(1, len(prompts), bench.seed), strict=True)), batch)
    comparison = Comparison(chosen, bench.call)
    comparison.warm_up(groups[0], ["ar"])
    results = comparison.measure(groups)
    best = report.fastest(results, PLAIN, "seconds")
    about, notes = {"suite": SPEED, "batch": batch}, comparison.notes
    return [about | facts(m) | figures(m.name, results, best) | {"note": notes.get(m.name, "")} for m in chosen]


def figures(name: str, calls: dict[str, list[ImageResult]], best: str) -> Record:
    """The figures of one method from its timed calls; None for those that do not apply.

    Args:
        calls: of every method, on the same prompts and seeds in the same order.
        best: the plain path for `speedup_vs_best_plain`.
    """
    own, plain = calls.get(name, []), calls["ar"]
    whole = together(own) if own else None
    stats = report.total(own)
    parts = {part: stats.seconds.get(part, 0.0) for part in ("draft", "verify")}
    parts["other"] = sum(much for part, much in stats.seconds.items() if part not in (*parts, "prefill"))
    same = [one for m, p in zip(own, plain, strict=False) for one in m.same(p)]
    return {
        "best_plain": best,
        "stock_path": name in PLAIN,
        **spread("speedup_e2e", over(plain, own)),
        **spread("speedup_decode", over(plain, own, "decode_seconds")),
        **spread("speedup_vs_best_plain", over(calls[best], own)),
        **spread("c", over(own, plain, "round_seconds")),
        **spread("seconds_per_image", [c.seconds / len(c.images) for c in own]),
        "forwards": whole and whole.forwards,
        "compression": whole and whole.compression,
        "tokens_per_target_call": stats.tokens_per_target_call if own else None,
        "shares": {part: s / sum(parts.values()) for part, s in parts.items()} if sum(parts.values()) else None,
        "seconds": {part: s / len(whole.images) for part, s in stats.seconds.items()} if whole else {},
        "identical_rate": statistics.fmean(same) if same else None,
        **charges(whole.spent if whole else (), own[0].tokens[0].numel() if own else 1),
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
