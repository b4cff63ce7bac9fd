"""`mmspec generate` with a MAR: classes in, pictures out, and how many passes and head evaluations they took."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mmspec.app import mar
from mmspec.app.engine import EngineError
from mmspec.app.orders import DrawingOrder, write, write_sheet
from mmspec.app.painter import PLAIN
from mmspec.continuous import cspd

SELF = "self"
FOREIGN = ("top_k", "coupling", "init", "proactive", "reproducible", "budget")  # of models that draw ids


def draw(args: argparse.Namespace, orders: Sequence[DrawingOrder]) -> None:
    """Draw the orders of a parsed command line, write them and sum up.

    Raises:
        EngineError: an option or a class that a MAR does not have.
    """
    strange = next((name for name in FOREIGN if not any(getattr(args, name) is unset for unset in (None, False))), None)
    if strange:
        raise EngineError(f"--{strange.replace('_', '-')} is for models that draw ids; this one is a MAR")
    model = mar.load(args.model, args.device, args.dtype, guidance_scale=args.guidance, temperature=args.temperature)
    how = _speculation(args, model)
    bent = how is not None and how.get("rule") == "cspd"
    note = model.singly(args.compare or not bent) if args.compare or how is not None else ""
    if note:
        print(f"note: {note}", file=sys.stderr)
    labels = [model.label(order.asked) for order in orders]
    made: list[mar.MarImages] = []
    base: list[mar.MarImages] = []
    for start in range(0, len(orders), args.batch_size):
        batch, some = orders[start : start + args.batch_size], labels[start : start + args.batch_size]
        seeds = [order.seed for order in batch]
        for found, way in ((made, how), (base, None))[: 1 + args.compare]:
            if args.compare and not start:
                model.draw(some, seeds, way)  # warms up: the two are to be compared
            found.append(model.draw(some, seeds, way))
        if not args.grid:
            write(batch, made[-1].images)
    if args.grid:
        fast, plain = ([picture for each in found for picture in each.images] for found in (made, base))
        write_sheet(orders, fast, plain, args.images)
    print(_told(made, "pictures" if len(orders) > 1 else "picture"))
    if base:
        print(f"plainly: {_told(base, 'of the unbent distribution' if bent else 'of the same distribution')}")
    if bent:
        print(f"not lossless: cspd(width={cspd.WIDTH:g}) bends the distribution; by how much is not measured")


def _speculation(args: argparse.Namespace, model: mar.MarSubject) -> dict[str, Any] | None:
    """`jacobi`, the default of this command, means the model's own drafts."""
    if args.drafter == PLAIN:
        if args.window or args.rule:
            raise EngineError(f"--window and --rule need a drafter; {PLAIN!r} draws without")
        return None
    how: dict[str, Any] = {} if args.window is None else {"ahead": args.window}
    if args.rule not in (None, "exact"):
        how["rule"] = args.rule
    if args.drafter not in ("jacobi", SELF):
        how["draft"] = model.small(args.drafter)
    return how


def _told(made: Sequence[mar.MarImages], what: str) -> str:
    count, seconds = sum(len(each.images) for each in made), sum(each.seconds for each in made)
    rows, evaluations = (sum(each.work[name] for each in made) / count for name in ("rows", "evaluations"))
    passes = sum(each.work["passes"] for each in made) / len(made)
    return (
        f"{count} {what} in {seconds:.1f} s; {passes:.1f} passes a batch; a picture has {rows:.0f} rows in them and "
        f"{evaluations:.0f} head evaluations"
    )
