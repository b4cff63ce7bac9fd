"""`mmspec generate`: prompts in, pictures out, and how many forwards of the model they took."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app import embedded
from mmspec.app.options import count, where
from mmspec.app.orders import DrawingOrder, write, write_sheet

if TYPE_CHECKING:
    from mmspec.app.painter import DrawingMethod, ImageResult, ImageSubject

OK, FATAL, INTERRUPTED = 0, 1, 130
OPTIONS = ("window", "init", "coupling", "proactive", "rule", "budget")  # of `enable`, each a flag of its own
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


class GenerateError(Exception):
    """A call that makes no sense; the message says what came, what is allowed and what to do."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `mmspec generate`."""
    parser.description = (
        "Draw pictures from prompts. Without a rule their distribution is the model's own, only faster; a relaxed rule "
        "bends it, and how far is printed. Exit code: 0 all well, 1 nothing (more) could be drawn."
    )
    add = parser.add_argument
    add("prompt", nargs="*", help="one or several prompts, each in quotes (or class numbers)")
    add("-o", "--out", type=Path, metavar="PATH", help="a file for one picture, else a folder (default: picture.png)")
    add("--prompts", type=Path, metavar="FILE", help="a file of prompts, one a line; they go into a folder")
    add("--images", type=count, default=1, metavar="N", help="pictures of each prompt, each with a seed of its own")
    add("--grid", action="store_true", help="one sheet with all pictures, a row a prompt, instead of single files")
    add("--compare", action="store_true", help="draw each by plain decoding too, and tell the difference")
    add("--batch-size", type=count, default=4, metavar="N", help="pictures drawn together (%(default)s)")
    add("--seed", type=int, default=0, help="of the first picture; the next ones count up (%(default)s)")
    model = parser.add_argument_group("the model")
    model.add_argument("--model", default=embedded.IMAGE_MODEL, help="a LlamaGen, a MAR, or mar (%(default)s)")
    where(model)
    model.add_argument(
        "--guidance", type=_bounded("a number from 0 on", 0), help="how closely to follow the prompt; 1 is not guided"
    )
    model.add_argument("--top-k", type=int, help="draw from the k likeliest tokens, 0 from all (the model's own)")
    model.add_argument("--temperature", type=float, help="0 takes the likeliest token (the model's own)")
    fast = parser.add_argument_group("how it is made fast")
    fast.add_argument("--drafter", default="jacobi", help="jacobi (a MAR: self), a folder, or none (%(default)s)")
    fast.add_argument("--window", type=int, help="tokens that jacobi looks at in one forward of the model")
    fast.add_argument("--coupling", help="how jacobi redraws its guesses: none, maximal or gumbel")
    fast.add_argument("--init", help="where jacobi's guesses come from: uniform, horizontal, vertical or mixture")
    fast.add_argument("--proactive", type=count, nargs=2, metavar=("K", "D"), help="a tree of K guesses, D - 1 deep")
    fast.add_argument("--reproducible", action="store_true", help="the very picture of plain decoding, in float32")
    fast.add_argument(
        "--rule", metavar="SPEC", help="change the distribution for speed, such as 'typical(epsilon=0.3, delta=0.05)'"
    )
    fast.add_argument("--budget", type=float, help="the most a rule may cost per picture, in total variation")


def run(args: argparse.Namespace) -> int:
    """Draw as the options say; the exit code."""
    from mmspec.app import generate_mar
    from mmspec.app.engine import EngineError
    from mmspec.app.mar import draws
    from mmspec.app.painter import load

    try:
        prompts = _prompts(args)
        if draws(args.model):
            generate_mar.draw(args, _orders(args, prompts))
            return OK
        way = _way(args)
        orders = _orders(args, prompts)
        settings = {"guidance_scale": args.guidance, "top_k": args.top_k, "temperature": args.temperature}
        painter = load(args.model, args.device, args.dtype, **settings)
        tokens = painter.tokens
        if args.window is not None and args.window > tokens:
            raise GenerateError(
                f"--window {args.window} is more than the {tokens} tokens of a picture; 8 to 64 is usual"
            )
        if painter.classes:
            orders = [replace(order, asked=_class(order.asked, painter.classes)) for order in orders]
        elif args.model == embedded.IMAGE_MODEL:
            _say_unknown(prompts)
        Run(painter, way, args).draw(orders)
    except (GenerateError, EngineError) as error:
        print(f"mmspec generate: {' '.join(str(error).split())}", file=sys.stderr)
        return FATAL
    except OSError as error:
        print(f"mmspec generate: {error}; what was written before is safe", file=sys.stderr)
        return FATAL
    return OK


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            prompts += [line.strip() for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise GenerateError(f"cannot read the prompts of {str(args.prompts)!r}: {error}") from error
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise GenerateError("no prompt; write one in quotes, or name a file of them with --prompts, one a line")
    return prompts


def _bounded(allowed: str, least: float) -> Callable[[str], float]:
    """A number from `least` on, for argparse."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return value

    return read


def _way(args: argparse.Namespace) -> DrawingMethod:
    from mmspec.app.painter import PLAIN, DrawingMethod

    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if args.proactive:
        given["proactive"] = tuple(args.proactive)
    if args.reproducible:
        given["reproducible"] = True
    useless = [name for name in given if name != "reproducible"]
    if args.drafter == PLAIN and useless:
        raise GenerateError(f"--{useless[0]} needs a drafter; {PLAIN!r} decodes one token after the other")
    if args.rule is None and args.budget is not None:
        raise GenerateError(
            "--budget limits a relaxed rule; name one, such as --rule 'typical(epsilon=0.3, delta=0.05)'"
        )
    if args.reproducible and args.rule not in (None, "exact"):
        raise GenerateError("--reproducible gives plain decoding's own picture, which a relaxed rule would change; "
                            "leave one of --reproducible and --rule out")  # fmt: skip
    return DrawingMethod(PLAIN) if args.drafter == PLAIN else DrawingMethod(args.drafter, given)


def _orders(args: argparse.Namespace, prompts: list[str]) -> list[DrawingOrder]:
    """Every picture with its seed and its file."""
    asked = [prompt for prompt in prompts for _ in range(args.images)]
    one = args.grid or (len(asked) == 1 and args.prompts is None and (args.out is None or args.out.suffix != ""))
    out = args.out or Path("picture.png" if one else "pictures")
    picture = out.suffix.lower() in ENDINGS
    if one and not picture:
        raise GenerateError(f"a picture is a file ending in {', '.join(ENDINGS)}; got {str(out)!r}")
    if not one and (picture or out.is_file()):
        raise GenerateError(f"{len(asked)} pictures do not fit into {str(out)!r}; name a folder, or add --grid")
    paths = [out if one else out / f"{i:04d}-{_slug(prompt)}.png" for i, prompt in enumerate(asked)]
    return [
        DrawingOrder(prompt, args.seed + i, path) for i, (prompt, path) in enumerate(zip(asked, paths, strict=True))
    ]


def _slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"


def _class(prompt: str, classes: int) -> int:
    if not prompt.isdecimal() or int(prompt) >= classes:
        raise GenerateError(f"this model draws classes, by their numbers from 0 to {classes - 1}; {prompt!r} is none")
    return int(prompt)


def _say_unknown(prompts: Sequence[str]) -> None:
    from mmspec.app.painter import NOTE, unknown_words

    unknown = unknown_words(prompts)
    if unknown:
        print(NOTE.format(", ".join(unknown[:8])), file=sys.stderr)


class Run:
    """Draws orders in batches, writes each batch at once, and sums up what it took."""

    def __init__(self, painter: ImageSubject, way: DrawingMethod, args: argparse.Namespace) -> None:
        from mmspec.app.painter import DrawingMethod

        self.painter, self.way, self.args = painter, way, args
        self.plain = DrawingMethod()
        painter.go(way)  # a bad option is told before anything is drawn
        self.made: list[ImageResult] = []
        self.base: list[ImageResult] = []

    def draw(self, orders: Sequence[DrawingOrder]) -> None:
        size = self.args.batch_size
        for start in range(0, len(orders), size):
            batch = orders[start : start + size]
            painting = self._paint(self.way, batch, start == 0)
            self.made.append(painting)
            if not self.args.grid:
                write(batch, painting.images)
            if self.args.compare:
                self.base.append(self._paint(self.plain, batch, start == 0))
        if self.args.grid:
            made, base = ([image for each in some for image in each.images] for some in (self.made, self.base))
            write_sheet(orders, made, base, self.args.images)
        self._say()

    def _paint(self, way: DrawingMethod, batch: Sequence[DrawingOrder], first: bool) -> ImageResult:
        asked, seeds = [order.asked for order in batch], [order.seed for order in batch]
        if self.args.compare:
            self.painter.go(way)
            if first:
                self.painter.paint(asked, seeds)  # warms up: the two are to be compared
        return self.painter.paint(asked, seeds)

    def _say(self) -> None:
        count = sum(len(painting.images) for painting in self.made)
        seconds = sum(painting.seconds for painting in self.made)
        forwards, pace = _rate(self.made)
        print(f"{count} picture{'s' * (count != 1)} in {seconds:.1f} s; {forwards:.1f} forwards of the model each, "
              f"{pace:.2f} tokens per forward")  # fmt: skip
        rule = self.way.options.get("rule", "exact")
        if rule != "exact":
            spent = [charge for painting in self.made for charge in painting.spent]
            print(f"not lossless: {rule} bent the distribution; distance in total variation charged per picture: mean "
                  f"{statistics.fmean(spent):.2f}, most {max(spent):.2f} (summed over its tokens)")  # fmt: skip
        if self.base:
            self._say_comparison(seconds)

    def _say_comparison(self, seconds: float) -> None:
        plain, (forwards, _), (own, _) = sum(p.seconds for p in self.base), _rate(self.base), _rate(self.made)
        same = [bool((a == b).all()) for m, p in zip(self.made, self.base, strict=True)
                for a, b in zip(m.tokens, p.tokens, strict=True)]  # fmt: skip
        identical = f"identical pictures: {sum(same)} of {len(same)}"
        if not self.args.reproducible and self.args.drafter != "none":
            identical += (
                " (others drawn from " + ("a bent" if self.way.options.get("rule") else "the same") + " distribution)"
            )
        print(f"plain decoding took {plain:.1f} s, {plain / seconds:.2f} times as long, and {forwards:.1f} forwards, "
              f"{forwards / own:.2f} times as many; {identical}")  # fmt: skip


def _rate(paintings: Sequence[ImageResult]) -> tuple[float, float]:
    """Forwards per picture, and tokens per forward."""
    count = sum(len(painting.images) for painting in paintings)
    forwards = sum(painting.stats.row_rounds for painting in paintings) / count + 1
    return forwards, paintings[0].tokens[0].numel() / forwards
