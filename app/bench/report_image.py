"""Computes the records of the image suite from timed calls."""

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
    """The figures of one method from its timed calls (ImageResults); None for those that do not apply.

    Args:
        calls: of every method, on the same prompts and seeds in the same order.
        best: the plain path for `speedup_vs_best_plain`.
        reads: how often one call read values of tensors to the host, if that was counted.
    """
    own, plain = calls.get(name, []), calls["ar"]
    whole = total(own)
    parts = {part: whole.seconds.get(part, 0.0) for part in ("draft", "verify")}
    parts["other"] = sum(much for part, much in whole.seconds.items() if part not in (*parts, "prefill"))
    spent, pictures = [charge for call in own for charge in call.spent], sum(len(call.images) for call in own)
    same = [bool((a == b).all()) for m, p in zip(own, plain, strict=False)
            for a, b in zip(m.tokens, p.tokens, strict=True)]  # fmt: skip
    compression = sum(c.tokens.numel() for c in own) / (whole.row_rounds + pictures) if own else None
    cost = spread("c", over(own, plain, "round_seconds"))
    return {
        "best_plain": best,
        "stock_path": name in PLAIN,
        **spread("speedup_e2e", over(plain, own)),
        **spread("speedup_decode", over(plain, own, "decode_seconds")),
        **spread("speedup_vs_best_plain", over(calls[best], own)),
        **cost,
        **spread("seconds_per_image", [c.seconds / len(c.images) for c in own]),
        "forwards": (whole.row_rounds + pictures) / pictures if pictures else None,
        "compression": compression,
        "tokens_per_target_call": whole.tokens_per_target_call if own else None,
        "limit": compression / cost["c"] if compression and cost["c"] else None,
        "acceptance_by_depth": [round(whole.acceptance(d), 4) for d in sorted(whole.accepted_by_depth)],
        "shares": {part: s / sum(parts.values()) for part, s in parts.items()} if sum(parts.values()) else None,
        "seconds": {part: s / pictures for part, s in whole.seconds.items()} if pictures else {},
        "identical_rate": statistics.fmean(same) if same else None,
        **charges(spent, own[0].tokens[0].numel() if own else 1),
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


def fastest(calls: dict[str, list[Any]]) -> str:
    """The plain path with the least time per picture."""
    return report.fastest(calls, PLAIN, "seconds")
