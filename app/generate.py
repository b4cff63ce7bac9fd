"""`mmspec generate`: draws pictures from prompts, and reports how many forwards of the model they took."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app import embedded, enabling
from mmspec.app.embedded import STOCK
from mmspec.app.options import count, from_zero, where

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmspec.app.mar import MarImages, MarSubject
    from mmspec.app.painter import ImageResult, Subject

OK, FATAL = 0, 1
EXACT = "exact"  # the lossless rule
OWN, PLAIN = "mmspec", "plain"  # the two sides of --compare
SELF = "self"  # drafter: a MAR drafts for itself
MAR_TAKES = ("window", "rule", "prefill", "width")
SHORT: tuple[tuple[str, str, dict[str, Any]], ...] = (  # options of `--enable` that have their own flag
    ("--window", "tokens that jacobi verifies in one forward of the model", {"metavar": "N"}),
    ("--coupling", "how jacobi redraws its guesses: none, maximal or gumbel", {}),
    ("--init", "where jacobi's first guesses come from: neighbours, uniform, horizontal, vertical or mixture", {}),
    ("--proactive", "a tree of K guesses, D - 1 deep", {"nargs": 2, "metavar": ("K", "D")}),
    ("--reproducible", "draw exactly the picture of plain decoding, in float32", {"nargs": 0}),
    ("--rule", "change the distribution for speed, such as 'typical(epsilon=0.3, delta=0.05)'", {"metavar": "SPEC"}),
    ("--budget", "limit of a rule's cost per picture, in total variation", {}),
)
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class DrawingOrder:
    condition: Any  # prompt or class
    seed: int
    path: Path


class GenerateError(Exception):
    """Invalid arguments; the message says what was given, what is allowed and what to do."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw pictures from prompts. Without a rule their distribution is the model's own; a relaxed rule, for speed, "
        "changes it, and by how much is printed. Exit code: 0 success, 1 nothing (more) could be drawn."
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or several prompts, each in quotes (or class numbers)")
    add("-o", "--out", type=Path, metavar="PATH", help="a file for one picture, else a folder (default: picture.png)")
    add("--prompts", type=Path, metavar="FILE", help="a file of prompts, one per line; the pictures go into a folder")
    add("--images", type=count, default=1, metavar="N", help="pictures of each prompt, each with its own seed")
    add("--grid", action="store_true", help="one sheet with all pictures, a row per prompt, instead of single files")
    add("--compare", action="store_true", help="draw each by plain decoding too, and print the difference")
    add("--batch-size", type=count, default=4, metavar="N", help="pictures drawn together (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the first picture; it counts up for the next ones (%(default)s)")
    model = parser.add_argument_group("the model")
    model.add_argument("--model", default=embedded.IMAGE_MODEL, help="a LlamaGen, a MAR, or mar (%(default)s)")
    where(model)
    model.add_argument("--guidance", type=from_zero, help="how closely to follow the prompt; 1 is not guided")
    model.add_argument("--top-k", type=int, help="sample from the k likeliest tokens, 0 from all (the model's own)")
    model.add_argument("--temperature", type=float, help="0 is greedy decoding (the model's own)")
    fast = parser.add_argument_group("speculation")
    fast.add_argument("--drafter", default="jacobi", help="jacobi (a MAR: self), a folder, or none (%(default)s)")
    for flag, help, takes in SHORT:
        enabling.short(fast, flag, help, **takes)
    enabling.add(fast)


def run(args: argparse.Namespace) -> int:
    from mmspec.app import mar, painter
    from mmspec.app.devices import EngineError

    try:
        prompts, continuous = _prompts(args), mar.draws(args.model)
        options = (_options_mar if continuous else _options)(args)
        orders = _orders(args, prompts)
        settings = {"guidance_scale": args.guidance, "top_k": args.top_k, "temperature": args.temperature}
        say(f"loading {args.model}")
        subject = (mar if continuous else painter).load(args.model, args.device, args.dtype, **settings)
        if isinstance(subject, mar.MarSubject):
            way: Any = _speculation(args, subject, options)
        else:
            if (options.get("window") or 0) > subject.tokens:
                raise GenerateError(
                    f"window={options['window']} exceeds the {subject.tokens} tokens of a picture; 8 to 64 is usual"
                )
            way = painter.DrawingMethod(embedded.fitting(args.drafter, args.model), options)
        orders = [replace(order, condition=subject.label(order.condition)) for order in orders]
        if args.model == embedded.IMAGE_MODEL and (unknown := painter.unknown_words(prompts)):
            print(painter.NOTE.format(", ".join(unknown[:8])), file=sys.stderr)
        summary: Any = _summary_mar if continuous else _summary
        print("\n".join(summary(*_draw(subject, way, orders, args), args.drafter, options)))
    except (GenerateError, EngineError, enabling.EnableError) as error:
        print(f"mmspec generate: {' '.join(str(error).split())}", file=sys.stderr)
        return FATAL
    except OSError as error:
        print(f"mmspec generate: {error}; pictures written before are kept", file=sys.stderr)
        return FATAL
    return OK


def _draw(subject: Subject, way: Any, orders: Sequence[DrawingOrder], args: argparse.Namespace) -> tuple[Any, Any]:
    """Draw in batches and write each at once; returns the results of the calls, and those of plain decoding."""
    from mmspec.app.compare import Comparison, Side

    sides = [Side(OWN, way), Side(PLAIN, subject.plain)][: 1 + args.compare]
    comparison: Comparison[Side, Sequence[DrawingOrder], Any] = Comparison(
        sides, lambda side, some: subject.draw([o.condition for o in some], [o.seed for o in some], side.how)
    )
    say(f"drawing {len(orders)} picture{'s' * (len(orders) != 1)}, {min(len(orders), args.batch_size)} at a time")
    batches = [orders[start : start + args.batch_size] for start in range(0, len(orders), args.batch_size)]
    if args.compare:
        comparison.warm_up(batches[0], [OWN, PLAIN])
    done, began = 0, time.monotonic()
    for batch, drawn in zip(batches, comparison.turns(batches), strict=True):
        if not args.grid:
            write(batch, drawn[OWN].images)
        done += len(batch)
        if done < len(orders):
            say(f"{done} of {len(orders)} pictures, {time.monotonic() - began:.0f} s")
    results, base = (comparison.results.get(name, []) for name in (OWN, PLAIN))
    if args.grid:
        fast, plain = ([image for each in some for image in each.images] for some in (results, base))
        write_sheet(orders, fast, plain, args.images)
    return results, base


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            prompts += [line.strip() for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise GenerateError(f"cannot read the prompts of {str(args.prompts)!r}: {error}") from error
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise GenerateError("no prompt; write one in quotes, or name a file of them with --prompts, one per line")
    return prompts


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `mmspec.enable`, checked as far as possible without a model."""
    unused = [name for name in enabling.unchecked(args.enable) if name != "reproducible"]
    if args.drafter == STOCK and unused:
        raise GenerateError(f"{unused[0]} needs a drafter; {STOCK!r} decodes one token after the other")
    return {} if args.drafter == STOCK else enabling.given(args.enable, args.drafter)


def _orders(args: argparse.Namespace, prompts: list[str]) -> list[DrawingOrder]:
    conditions = [prompt for prompt in prompts for _ in range(args.images)]
    one = args.grid or (len(conditions) == 1 and args.prompts is None and (args.out is None or args.out.suffix != ""))
    out = args.out or Path("picture.png" if one else "pictures")
    picture = out.suffix.lower() in ENDINGS
    if one and not picture:
        raise GenerateError(f"a picture is a file ending in {', '.join(ENDINGS)}; got {str(out)!r}")
    if not one and (picture or out.is_file()):
        raise GenerateError(f"{len(conditions)} pictures do not fit into {str(out)!r}; name a folder, or add --grid")
    slugs = (re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture" for prompt in conditions)
    paths = [out if one else out / f"{i:04d}-{slug}.png" for i, slug in enumerate(slugs)]
    return [DrawingOrder(prompt, args.seed + i, paths[i]) for i, prompt in enumerate(conditions)]


def write(orders: Sequence[DrawingOrder], pictures: Sequence[Image]) -> None:
    for order, picture in zip(orders, pictures, strict=True):
        order.path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(order.path)
        print(order.path)


def write_sheet(orders: Sequence[DrawingOrder], pictures: Sequence[Image], plain: Sequence[Image], across: int) -> None:
    """Write one sheet with a row per prompt, and below each row that of plain decoding, if there is one."""
    from mmspec.app.painter import sheet

    rows = []
    for i in range(0, len(pictures), across):
        rows.append((str(orders[i].condition), pictures[i : i + across]))
        rows += [("plain decoding", plain[i : i + across])] if plain else []
    write(orders[:1], [sheet(rows)])


def _summary(
    results: Sequence[ImageResult], base: Sequence[ImageResult], drafter: str, options: dict[str, Any]
) -> Iterator[str]:
    """Lines with the time and forwards, the cost of a rule, and the comparison with plain decoding."""
    rule = options.get("rule") or EXACT
    relaxed = rule != EXACT
    count, seconds = sum(len(each.images) for each in results), sum(each.seconds for each in results)
    own, pace = _rate(results)
    yield (
        f"{count} picture{'s' * (count != 1)} in {seconds:.1f} s; {own:.1f} forwards of the model each, {pace:.2f} "
        "tokens per forward"
    )
    if relaxed:
        spent = [charge for each in results for charge in each.spent]
        yield (
            f"not lossless: {rule} changed the distribution; total-variation cost per picture: mean "
            f"{statistics.fmean(spent):.2f}, maximum {max(spent):.2f} (summed over its tokens)"
        )
    if base:
        plain, (forwards, _) = sum(each.seconds for each in base), _rate(base)
        same = [bool((a == b).all()) for m, p in zip(results, base, strict=True)
                for a, b in zip(m.tokens, p.tokens, strict=True)]  # fmt: skip
        identical = f"identical pictures: {sum(same)} of {len(same)}"
        if not options.get("reproducible") and drafter != STOCK:
            identical += f" (the others are from {'a changed' if relaxed else 'the same'} distribution)"
        yield (
            f"plain decoding took {plain:.1f} s, {plain / seconds:.2f} times as long, and {forwards:.1f} forwards, "
            f"{forwards / own:.2f} times as many; {identical}"
        )


def _rate(paintings: Sequence[ImageResult]) -> tuple[float, float]:
    """Forwards per picture, and tokens per forward."""
    count = sum(len(painting.images) for painting in paintings)
    forwards = sum(painting.stats.row_rounds for painting in paintings) / count + 1
    return forwards, paintings[0].tokens[0].numel() / forwards


def _options_mar(args: argparse.Namespace) -> dict[str, Any]:
    options = enabling.unchecked(args.enable)
    wrong = [*(["--top-k"] if args.top_k is not None else []), *(name for name in options if name not in MAR_TAKES)]
    if wrong:
        raise GenerateError(
            f"{wrong[0]} is for models that draw token ids; this one is a MAR, which takes {', '.join(MAR_TAKES)}"
        )
    if args.drafter == STOCK and options:
        raise GenerateError(f"{' and '.join(options)} need a drafter; {STOCK!r} draws without")
    return options


def _speculation(args: argparse.Namespace, model: MarSubject, options: dict[str, Any]) -> dict[str, Any] | None:
    """The speculation settings of a MAR; `jacobi`, the default drafter, means that the MAR drafts for itself."""
    how: dict[str, Any] | None = None
    if args.drafter != STOCK:
        given = {**options, "ahead": options.get("window"), "window": None}
        how = {name: value for name, value in given.items() if value not in (None, EXACT)}
        if args.drafter not in ("jacobi", SELF):
            how["draft"] = model.small(args.drafter)
    note = ""
    if (args.compare or how is not None) and options.get("rule") != "cspd":  # cspd works with any schedule and sampler
        note = model.singly()
    if note:
        print(f"note: {note}", file=sys.stderr)
    return how


def _summary_mar(
    results: Sequence[MarImages], base: Sequence[MarImages], drafter: str, options: dict[str, Any]
) -> Iterator[str]:
    """The same for a MAR."""
    from mmspec.continuous import cspd

    def sums(some: Sequence[MarImages], what: str) -> str:
        count, seconds = sum(len(each.images) for each in some), sum(each.seconds for each in some)
        rows, evaluations = (sum(each.work[name] for each in some) / count for name in ("rows", "evaluations"))
        passes = sum(each.work["passes"] for each in some) / len(some)
        return (
            f"{count} {what} in {seconds:.1f} s; {passes:.1f} passes per batch; a picture has {rows:.0f} rows in them "
            f"and {evaluations:.0f} head evaluations"
        )

    relaxed = options.get("rule") == "cspd"
    yield sums(results, f"picture{'s' * (sum(len(each.images) for each in results) > 1)}")
    if base:
        yield "plain decoding: " + sums(base, f"of the {'unchanged' if relaxed else 'same'} distribution")
    if relaxed:
        width = options.get("width", cspd.WIDTH)
        yield f"not lossless: cspd(width={width:g}) changes the distribution; by how much is not measured"
