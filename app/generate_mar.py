"""`mmspec generate` with a MAR: classes in, pictures out, and how many passes and head evaluations they took."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mmspec import zoo
from mmspec.app import mar
from mmspec.app.engine import EngineError
from mmspec.app.painter import PLAIN, sheet
from mmspec.zoo.recipes import SCENES_MAR

SELF = "self"
FOREIGN = ("top_k", "coupling", "init", "proactive", "reproducible", "budget")  # of models that draw ids


def draw(args: argparse.Namespace, orders: Sequence[Any]) -> None:
    """Draw the orders of a parsed command line, write them and sum up.

    Raises:
        EngineError: an option or a class that a MAR does not have.
    """
    strange = next((name for name in FOREIGN if getattr(args, name)), None)
    if strange:
        raise EngineError(f"--{strange.replace('_', '-')} is for models that draw ids; this one is a MAR")
    model = mar.load(args.model, args.device, args.dtype, guidance_scale=args.guidance, temperature=args.temperature)
    how = _speculation(args)
    labels = [model.label(order.asked) for order in orders]
    made: list[mar.Made] = []
    base: list[mar.Made] = []
    for start in range(0, len(orders), args.batch_size):
        batch, some = orders[start : start + args.batch_size], labels[start : start + args.batch_size]
        seeds = [order.seed for order in batch]
        if args.compare and not start:
            model.draw(some, seeds, how)  # warms up: the two are to be compared
        made.append(model.draw(some, seeds, how))
        if args.compare:
            base.append(model.draw(some, seeds))
        for order, picture in zip(batch, made[-1].images, strict=True) if not args.grid else ():
            order.path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(order.path)
            print(order.path)
    if args.grid:
        pictures, across = [picture for each in made for picture in each.images], args.images
        rows = [(str(orders[i].asked), pictures[i : i + across]) for i in range(0, len(pictures), across)]
        orders[0].path.parent.mkdir(parents=True, exist_ok=True)
        sheet(rows).save(orders[0].path)
        print(orders[0].path)
    print(_told(made, "pictures" if len(orders) > 1 else "picture"))
    if base:
        print(f"plainly: {_told(base, 'of the same law')}")


def _speculation(args: argparse.Namespace) -> dict[str, Any] | None:
    """`jacobi`, the default of this command, means the model's own drafts."""
    if args.drafter == PLAIN:
        if args.window or args.rule:
            raise EngineError(f"--window and --rule need a drafter; {PLAIN!r} draws one token an iteration")
        return None
    how: dict[str, Any] = {} if args.window is None else {"ahead": args.window}
    if args.rule not in (None, "exact"):
        how["rule"] = args.rule
    if args.drafter not in ("jacobi", SELF):
        how["draft"] = zoo.path(args.drafter) if args.drafter == SCENES_MAR.draft else args.drafter
    return how


def _told(made: Sequence[mar.Made], what: str) -> str:
    count, seconds = sum(len(each.images) for each in made), sum(each.seconds for each in made)
    rows, evaluations = (sum(each.work[name] for each in made) / count for name in ("rows", "evaluations"))
    passes = sum(each.work["passes"] for each in made) / len(made)
    return (
        f"{count} {what} in {seconds:.1f} s; {passes:.1f} passes a batch; a picture has {rows:.0f} rows in them and "
        f"{evaluations:.0f} head evaluations"
    )
