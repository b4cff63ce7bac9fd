"""Records of the image benchmark: what is read off timed calls."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mmspec.app.bench.report import Record, spread
from mmspec.app.compare import over
from mmspec.statistics import Stats

PLAIN = ("ar", "ar-static", "ar-compiled")
SPEED = "image"  # the suite of these records


def figures(name: str, calls: dict[str, list[Any]], best: str, reads: int | None = None) -> Record:
    """What is read off the timed calls (Paintings) of one method; None where there is nothing to read.

    Args:
        calls: of every method, on the same prompts and seeds in the same order.
        best: the plain path for `speedup_vs_best_plain`.
        reads: how often one call asked a tensor for its values, where that was counted.
    """
    made, plain = calls.get(name, []), calls["ar"]

    total = Stats()
    for call in made:
        total.add(call.stats)
    parts = {part: total.seconds.get(part, 0.0) for part in ("draft", "verify")}
    parts["other"] = sum(much for part, much in total.seconds.items() if part not in (*parts, "prefill"))
    spent, pictures = [charge for call in made for charge in call.spent], sum(len(call.images) for call in made)
    same = [bool((a == b).all()) for m, p in zip(made, plain, strict=False)
            for a, b in zip(m.tokens, p.tokens, strict=True)]  # fmt: skip
    compression = sum(c.tokens.numel() for c in made) / (total.row_rounds + pictures) if made else None
    cost = spread("c", over(made, plain, "round_seconds"))
    return {
        "best_plain": best,
        "stock_path": name in PLAIN,
        **spread("speedup_e2e", over(plain, made)),
        **spread("speedup_decode", over(plain, made, "decode_seconds")),
        **spread("speedup_vs_best_plain", over(calls[best], made)),
        **cost,
        **spread("seconds_per_image", [c.seconds / len(c.images) for c in made]),
        "forwards": (total.row_rounds + pictures) / pictures if pictures else None,
        "compression": compression,
        "tokens_per_target_call": total.tokens_per_target_call if made else None,
        "limit": compression / cost["c"] if compression and cost["c"] else None,
        "acceptance_by_depth": [round(total.acceptance(d), 4) for d in sorted(total.accepted_by_depth)],
        "shares": {part: s / sum(parts.values()) for part, s in parts.items()} if sum(parts.values()) else None,
        "seconds": {part: s / pictures for part, s in total.seconds.items()} if pictures else {},
        "identical_rate": statistics.fmean(same) if same else None,
        **charges(spent, made[0].tokens[0].numel() if made else 1),
        "reads": reads,
        "n": len(made),
    }


def charges(spent: Sequence[float], tokens: int) -> Record:
    """Mean and largest charge per picture, and the mean per token."""
    mean = statistics.fmean(spent) if spent else None
    return {
        "spent": mean,
        "spent_max": max(spent, default=None),
        "spent_per_token": None if mean is None else mean / tokens,
    }


def fastest(calls: dict[str, list[Any]]) -> str:
    """The plain path with the least time per picture."""
    here = [name for name in PLAIN if name in calls]
    return min(here, key=lambda name: statistics.median(call.seconds for call in calls[name]))
