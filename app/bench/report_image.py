"""Records of the image benchmark: what is read off timed calls."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mmspec.app.bench import report
from mmspec.app.bench.report import Record, spread, total
from mmspec.app.compare import over

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
    whole = total(made)
    parts = {part: whole.seconds.get(part, 0.0) for part in ("draft", "verify")}
    parts["other"] = sum(much for part, much in whole.seconds.items() if part not in (*parts, "prefill"))
    spent, pictures = [charge for call in made for charge in call.spent], sum(len(call.images) for call in made)
    same = [bool((a == b).all()) for m, p in zip(made, plain, strict=False)
            for a, b in zip(m.tokens, p.tokens, strict=True)]  # fmt: skip
    compression = sum(c.tokens.numel() for c in made) / (whole.row_rounds + pictures) if made else None
    cost = spread("c", over(made, plain, "round_seconds"))
    return {
        "best_plain": best,
        "stock_path": name in PLAIN,
        **spread("speedup_e2e", over(plain, made)),
        **spread("speedup_decode", over(plain, made, "decode_seconds")),
        **spread("speedup_vs_best_plain", over(calls[best], made)),
        **cost,
        **spread("seconds_per_image", [c.seconds / len(c.images) for c in made]),
        "forwards": (whole.row_rounds + pictures) / pictures if pictures else None,
        "compression": compression,
        "tokens_per_target_call": whole.tokens_per_target_call if made else None,
        "limit": compression / cost["c"] if compression and cost["c"] else None,
        "acceptance_by_depth": [round(whole.acceptance(d), 4) for d in sorted(whole.accepted_by_depth)],
        "shares": {part: s / sum(parts.values()) for part, s in parts.items()} if sum(parts.values()) else None,
        "seconds": {part: s / pictures for part, s in whole.seconds.items()} if pictures else {},
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
    return report.fastest(calls, PLAIN, "seconds")
