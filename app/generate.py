"""`mmspec generate`: draws pictures from prompts, and reports how many forwards of the model they took."""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app import embedded, enabling
from mmspec.app.embedded import STOCK
from mmspec.app.extras import EngineError, say
from mmspec.app.files import check_writable
from mmspec.app.options import count, from_zero, seed_value, where
from mmspec.app.prompt import read_prompts

if TYPE_CHECKING:
    from mmspec.app.compare import Method
    from mmspec.app.painter import ImageSubject

OWN = "mmspec"
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class DrawingOrder:
    condition: Any  # prompt or class
    seed: int
    path: Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw pictures from prompts. Without a rule their distribution is the model's own; a relaxed rule, for speed, "
        "changes it, and by how much is printed. Exit code: 0 success, 1 nothing (more) could be drawn."
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or several prompts, each in quotes (or class numbers)")
    add("-o", "--out", type=Path, metavar="PATH", help="a file for one picture, else a folder (a new picture.png)")
    add("--overwrite", action="store_true", help="replace pictures that are there already")
    add("--prompts", type=read_prompts, metavar="FILE", help="prompts, one per line; the pictures go into a folder")
    add("--images", type=count, default=1, metavar="N", help="pictures of each prompt (%(default)s)")
    add("--compare", action="store_true", help="draw each by plain decoding too, and print the difference")
    add("--batch-size", type=count, default=4, metavar="N", help="pictures drawn together (%(default)s)")
    add("--seed", type=seed_value, default=0, help="of the first picture, and counts up; but for a "
        "LlamaGen or MAR, a batch draws all its pictures from the first one's (%(default)s)")  # fmt: skip
    model = parser.add_argument_group("the model")
    model.add_argument("--model", default=embedded.IMAGE_MODEL, help="a LlamaGen, MAR, Janus or Emu3, mar (embedded), "
        "or a Python file of your own (%(default)s)")  # fmt: skip
    where(model)
    model.add_argument("--guidance", type=from_zero, help="how closely to follow the prompt; 1 is not guided")
    model.add_argument("--top-k", type=int, help="sample from the k likeliest tokens, 0 from all (the model's own)")
    model.add_argument("--temperature", type=float, help="0 is greedy decoding (the model's own)")
    fast = parser.add_argument_group("speculation")
    fast.add_argument("--drafter", default="jacobi", help="jacobi (a MAR: self), a folder, or none (%(default)s)")
    enabling.add(fast)


def run(args: argparse.Namespace) -> int:
    from mmspec.app import image_model, painter

    try:
        prompts = [*args.prompt, *(args.prompts or ())]
        if not prompts or not all(prompt.strip() for prompt in prompts):
            raise EngineError("no prompt; write one in quotes, or name a file of them with --prompts, one per line")
        continuous = image_model.is_mar(args.model)
        options = _options(args, continuous)
        orders = _orders(args, prompts)
        settings = {"guidance_scale": args.guidance, "top_k": args.top_k, "temperature": args.temperature}
        say(f"loading {args.model}")
        subject = image_model.load(args.model, args.device, args.dtype, **settings)
        method = _method(args, subject, options)
        orders = [replace(order, condition=subject.label(order.condition)) for order in orders]
        if args.model == embedded.IMAGE_MODEL:
            say(painter.NOTE)
        print("\n".join(_summary(*_draw(subject, method, orders, args), options, args.drafter)))
    except (EngineError, enabling.EnableError, OSError) as error:
        kept = "; pictures written before are kept" * isinstance(error, OSError)
        print(f"mmspec generate: {' '.join(str(error).split())}{kept}", file=sys.stderr)
        return 1
    return 0


def _draw(
    subject: ImageSubject, method: Method, orders: Sequence[DrawingOrder], args: argparse.Namespace
) -> tuple[list[Any], list[Any]]:
    """Draw in batches and write each at once; returns the results of the calls, and those of plain decoding."""
    from mmspec.app.compare import PLAIN, Comparison

    def draw(one: Method, some: Sequence[DrawingOrder]) -> Any:
        subject.go(one)
        return subject.paint([order.condition for order in some], [order.seed for order in some])

    comparison = Comparison([method, PLAIN][: 1 + args.compare], draw)
    say(f"drawing {len(orders)} picture{'s' * (len(orders) != 1)}, {min(len(orders), args.batch_size)} at a time")
    batches = [orders[start : start + args.batch_size] for start in range(0, len(orders), args.batch_size)]
    if args.compare:
        comparison.warm_up(batches[0], [OWN, PLAIN.name])
    for batch, drawn in zip(batches, comparison.turns(batches), strict=True):
        for order, picture in zip(batch, drawn[OWN].images, strict=True):
            order.path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(order.path)
            print(order.path)
    return comparison.results[OWN], comparison.results.get(PLAIN.name, [])


def _options(args: argparse.Namespace, continuous: bool) -> dict[str, Any]:
    """The options of `mmspec.enable`, checked as far as possible without a model, or of a MAR's speculation."""
    if continuous and args.top_k is not None:
        raise EngineError("--top-k is for models that draw token ids; this one is a MAR")
    options = enabling.unchecked(args.enable) if continuous else enabling.given(args.enable, args.drafter)
    if args.drafter == STOCK and options:
        raise EngineError(f"{next(iter(options))} needs a drafter; {STOCK!r} decodes one token after the other")
    return options


def _method(args: argparse.Namespace, subject: ImageSubject, options: dict[str, Any]) -> Method:
    """How to draw; with a MAR, `jacobi`, the default drafter, means that the MAR drafts for itself."""
    from mmspec.app.compare import Method
    from mmspec.app.image_model import MarSubject

    plain = args.drafter == STOCK
    if not isinstance(subject, MarSubject):
        return Method(OWN, None if plain else embedded.fitting(args.drafter, args.model), options)
    small = options.get("draft") if args.drafter in ("jacobi", "self", STOCK) else args.drafter
    if isinstance(small, str):
        options = {**options, "draft": subject.small(small)}
    # cspd works with any schedule and sampler
    if (args.compare or not plain) and options.get("rule") != "cspd" and (note := subject.singly()):
        print(f"note: {note}", file=sys.stderr)
    return Method(OWN, None if plain else args.drafter, options)


def _orders(args: argparse.Namespace, prompts: list[str]) -> list[DrawingOrder]:
    conditions = [prompt for prompt in prompts for _ in range(args.images)]
    one = len(conditions) == 1 and args.prompts is None and (args.out is None or args.out.suffix != "")
    usual = Path("picture.png" if one else "pictures")
    others = (usual.with_stem(f"{usual.stem}-{number}") for number in itertools.count(2))
    out = args.out or next(path for path in itertools.chain([usual], others) if not path.exists())
    picture = out.suffix.lower() in ENDINGS
    if one and not picture:
        raise EngineError(f"a picture is a file ending in {', '.join(ENDINGS)}; got {str(out)!r}")
    if not one and (picture or out.is_file()):
        raise EngineError(f"{len(conditions)} pictures do not fit into {str(out)!r}; name a folder")
    slugs = (re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture" for prompt in conditions)
    paths = [out if one else out / f"{i:04d}-{slug}.png" for i, slug in enumerate(slugs)]
    if not args.overwrite and (there := next((path for path in paths if path.exists()), None)):
        raise EngineError(f"{there} is there already; choose another -o, or --overwrite")
    check_writable(paths[0])
    return [DrawingOrder(prompt, args.seed + i, paths[i]) for i, prompt in enumerate(conditions)]


def _summary(results: Sequence[Any], base: Sequence[Any], options: dict[str, Any], drafter: str) -> Iterator[str]:
    """Lines with the time and the work, the cost of a rule, and the comparison with plain decoding."""
    rule, seconds = options.get("rule"), sum(each.seconds for each in results)
    relaxed = rule == "cspd" or not all(each.lossless for each in results)
    count = sum(len(each.images) for each in results)
    yield f"{count} picture{'s' * (count != 1)} in {seconds:.1f} s; {_work(results)}"
    if rule == "cspd":
        yield "not lossless: cspd changes the distribution; by how much is not measured"
    elif relaxed:
        spent = [cost for each in results for cost in each.spent]
        yield (
            f"not lossless: {rule} changed the distribution; total-variation cost per picture: mean "
            f"{statistics.fmean(spent):.2f}, maximum {max(spent):.2f} (summed over its tokens)"
        )
    if base:
        plain = sum(each.seconds for each in base)
        same = sum(sum(m.same(p)) for m, p in zip(results, base, strict=True))
        identical = f"identical pictures: {same} of {count}"
        if not options.get("reproducible") and drafter != STOCK:
            identical += f" (the others are from {'a changed' if relaxed else 'the same'} distribution)"
        gain = f"{plain / seconds:.2f} times as long" if plain > seconds else "no longer: no gain here"
        yield f"plain decoding took {plain:.1f} s, {gain}; {_work(base)}; {identical}"


def _work(results: Sequence[Any]) -> str:
    """What the pictures took: forwards of the model, and of a MAR, evaluations of its head."""
    if results[0].work:  # of a MAR
        count = sum(len(each.images) for each in results)
        rows, evaluations = (sum(each.work[name] for each in results) / count for name in ("rows", "evaluations"))
        passes = sum(each.work["passes"] for each in results) / len(results)
        return (
            f"{passes:.1f} passes per batch; a picture has {rows:.0f} rows in them and {evaluations:.0f} head "
            "evaluations"
        )
    from mmspec.app.painter import together

    whole = together(results)
    return f"{whole.forwards:.1f} forwards of the model each, {whole.compression:.2f} tokens per forward"
