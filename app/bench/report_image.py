"""Records of the image benchmark: what is read off timed calls and galleries, their columns, and the quality curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mmspec.app.bench.report import LAYOUTS, Record, TableLayout, figure, ratio, spread
from mmspec.app.compare import over
from mmspec.statistics import Stats

PLAIN = ("ar", "ar-static", "ar-compiled")
SPEED, QUALITY = "image", "image-quality"  # the suites of the two kinds of record

SPEED_MEANING = {
    "speedup_e2e": "wall time per picture of the pipeline's plain loop (ar) over that of the method: text encoder, "
    "prefill and picture decoder included; median over calls side by side, same prompts and seeds, with quartiles",
    "speedup_decode": "the same for the rounds alone: draft, verify, accept and commit",
    "speedup_vs_best_plain": "speedup_e2e against the fastest plain path of that cell (named in best_plain)",
    "forwards": "forwards of the target per picture, the prefill included",
    "reads": "how often Python asked a tensor for its values in one call; on a GPU each of these waits for it",
    "compression": "tokens per forward that a picture takes part in, the prefill included; plain decoding has 1",
    "c": "time of one round of the method over the time of one step of ar, same prompts",
    "shares": "of the rounds: drafting, verifying (the target's forward), accepting and committing (host clock)",
    "seconds_per_image": "of the whole call, over its pictures",
    "identical_rate": "share of pictures with the very tokens that ar draws from the same seed",
    "spent": "mean and largest cost of a relaxed rule on one picture: a bound on its distribution's distance from the "
    "target's, in total variation, in expectation; above 1 it says nothing about the picture as a whole",
    "spent_per_token": "the same per token: what one position is off by, on average",
    "limit": "compression over c: the speed-up of the rounds that these two leave",
    "n": "timed calls",
}
QUALITY_MEANING = {
    "fd_ar": "Fréchet distance of features to pictures of a reference run of ar, same prompts, other seeds; that of ar "
    "itself is the noise. Biased upwards at small n: compare at equal n only",
    "fd_over_noise": "fd_ar over the mean distance of two independent runs of ar (all pairs: noise)",
    "fd_real": "Fréchet distance to real pictures of the same prompts",
    "precision": "share of pictures inside the manifold of the real ones (k-NN, k = 3), recall the other way round; "
    "against the reference run of ar where there are no real ones",
    "faithfulness": "share of the facts of a prompt (background, count, size, texture, colour, shape, relation) that "
    "the embedded VLM, asked to describe the picture, confirms; all_right: pictures with every fact right",
    "compression": SPEED_MEANING["compression"],
    "spent": SPEED_MEANING["spent"],
    "n": "pictures",
}


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


def _shares(record: Record) -> str:
    held = record["shares"]
    return "-" if held is None else " ".join(f"{100 * held[part]:.0f}" for part in ("draft", "verify", "other"))


def _spent(record: Record) -> str:
    none = record["lossless"] or record["spent"] is None
    return "-" if none else f"{record['spent']:.2f} ({record['spent_max']:.2f})"


def _identical(record: Record) -> str:
    return f"{record['identical_rate']:.0%}" if record["exact_seed"] and record["identical_rate"] is not None else "-"


def curves(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Quality records by the curve that they belong to; the single methods, lossless and bent, make one each."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["suite"] == QUALITY and record["fd_ar"] is not None:
            found.setdefault(
                record["family"] or ("distribution kept" if record["lossless"] else "distribution bent"), []
            ).append(record)
    return {name: sorted(some, key=lambda r: r["compression"]) for name, some in found.items()}


def draw_curves(panel: Any, records: Sequence[Record]) -> None:
    """Fréchet distance over tokens per forward, a line for each swept rule; the band is the noise of ar itself."""
    for name, some in curves(records).items():
        style = "o-" if some[0]["family"] else "^" if name == "distribution kept" else "x"
        panel.plot([r["compression"] for r in some], [r["fd_ar"] for r in some], style, label=name, markersize=4)
    noise = next((r["noise"] for r in records if r["suite"] == QUALITY and r["noise"]), None)
    if noise:
        panel.axhspan(min(noise), max(noise), color="#9aa3ad", alpha=0.3, label="two runs of ar")
    panel.set_xlabel("tokens per forward", fontsize=9)
    panel.set_ylabel("Fréchet distance to ar", fontsize=9)
    panel.legend(fontsize=7)


LAYOUTS[SPEED] = TableLayout(
    lambda r: f"batch {r['batch']}",
    (
        ("method", lambda r: r["method"]),
        ("distribution", lambda r: "kept" if r["lossless"] else "bent"),
        ("speedup (quartiles)", ratio("speedup_e2e")),
        ("rounds only", ratio("speedup_decode")),
        ("vs best plain", figure("speedup_vs_best_plain", "{:.2f}x")),
        ("forwards", figure("forwards", "{:.1f}")),
        ("host reads", figure("reads", "{:.0f}")),
        ("tokens/forward", figure("compression", "{:.2f}")),
        ("c", figure("c", "{:.2f}")),
        ("draft/verify/other %", _shares),
        ("s/image", figure("seconds_per_image", "{:.2f}")),
        ("same image", _identical),
        ("spent (max)", _spent),
        ("n", lambda r: str(r["n"])),
        ("setting", lambda r: r["setting"]),
    ),
    SPEED_MEANING,
)
LAYOUTS[QUALITY] = TableLayout(
    lambda r: f"quality of {r['n']} pictures, {r['backbone']}",
    (
        ("method", lambda r: r["method"]),
        ("distribution", lambda r: "kept" if r["lossless"] else "bent"),
        ("tokens/forward", figure("compression", "{:.2f}")),
        ("FD to ar", figure("fd_ar", "{:.3g}")),
        ("over noise", figure("fd_over_noise", "{:.2f}")),
        ("FD to real", figure("fd_real", "{:.3g}")),
        ("precision", figure("precision", "{:.2f}")),
        ("recall", figure("recall", "{:.2f}")),
        ("faithful", figure("faithfulness", "{:.1%}")),
        ("all right", figure("all_right", "{:.0%}")),
        ("spent (max)", _spent),
        ("setting", lambda r: r["setting"]),
    ),
    QUALITY_MEANING,
    draw_curves,
)
