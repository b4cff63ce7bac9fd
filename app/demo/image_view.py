"""HTML for a pair of the image tabs: both pictures with their grids, headline and figures; pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from mmspec.app.bench.report import Record
from mmspec.app.demo import look
from mmspec.app.demo.easel import CSPD, LOSSLESS, OF_MAR, Canvas, Pair
from mmspec.app.demo.look import duration
from mmspec.app.demo.race import DONE
from mmspec.app.files import inline

LEGEND = look.legend('<i class="mm-dot"></i> first token of a forward, which gives all tokens up to the next dot')
START = (
    "Choose a {} and press <b>Draw</b>. The picture is drawn twice from the same seed, token by token and then with "
    "drafts; then both are replayed side by side, each at the pace that was measured."
)
KEPT = "kept", "✓ same distribution, lossless: another picture, with its own noise"


def board(canvas: Canvas, fast: float, marked: bool) -> str:
    """The picture, revealed token by token; if `marked`, with a dot where a forward begins."""
    begins = set(canvas.begins) if marked else set()
    cells = "".join(
        f"<i{' class=mm-call' * (place in begins)} {look.moment(at, fast)}></i>" if at else '<i class="mm-open"></i>'
        for place, at in enumerate(canvas.at)
    )
    image = "" if canvas.image is None else f'<img src="{inline(canvas.image)}" alt="the picture">'
    label = f"{canvas.count} of {len(canvas.at)} tokens drawn, in {forwards(canvas)} forwards"
    return (
        f'<div class="mm-canvas">{image}<div class="mm-cells" style="--n:{canvas.grid}" role="img" '
        f'aria-label="{label}">{cells}</div></div>'
    )


def stage(pair: Pair, marked: bool) -> str:
    fast = look.speed_factor(pair)
    about = f"{pair.wish.method}: one forward verifies many tokens"
    return look.stage(pair, (("Plain", "one forward of the model for each token", board(pair.plain, fast, False)),
                             ("mmspec", about, board(pair.fast, fast, marked))))  # fmt: skip


def forwards(canvas: Canvas) -> int:
    """The number of forwards; a MAR's forwards without new tokens are counted only at the end."""
    return getattr(canvas.result, "work", {}).get("passes", len(canvas.calls))


def per_forward(canvas: Canvas) -> float:
    return canvas.count / max(1, forwards(canvas))


def headline(pair: Pair, measured: Mapping[str, Record] | None = None, *notes: str) -> str:
    """The speed-up, tokens per forward, how the picture relates to the plain one, and the cost of a rule.

    Args:
        measured: the bench's records of the quality of a MAR's pictures, by method.
    """
    if pair.speed_up and pair.wish.method in OF_MAR:
        kept = _cspd(pair, measured or {}) if pair.wish.method == CSPD else _exact(pair)
        notes = (kept, _fewer(pair), *notes)
    elif pair.speed_up and pair.wish.rule != LOSSLESS:
        notes = (_bound(pair), *notes)
    badge = look.badge(*acceptance(pair), pair.over)
    return look.headline(pair.speed_up, per_forward(pair.fast), "forward", badge, *notes, look.pace(pair))


def acceptance(pair: Pair) -> tuple[str, str]:
    """The badge as (same, kept, different, lossy or open; its text)."""
    wish, fast, total = pair.wish, pair.fast, len(pair.fast.at)
    if not pair.over or pair.plain.state != DONE or fast.state != DONE:
        return "open", "nothing to compare" if pair.over else "not compared yet"
    if wish.method == CSPD:
        return "lossy", "approximate: a picture of another distribution"
    if wish.rule != LOSSLESS and wish.temperature > 0:
        [spent] = fast.result.spent
        return "lossy", f"lossy: cost {spent:.2f} in total variation, {spent / total:.3f} per token"
    if wish.method in OF_MAR:
        return KEPT
    if pair.same == total:
        return "same", f"✓ the same picture: {total} of {total} tokens"
    if wish.same:
        return "different", f"another picture: {pair.same} of {total} tokens agree, where all should"
    return KEPT


def _bound(pair: Pair) -> str:
    """A sentence about the cost of a relaxed rule."""
    [spent] = pair.fast.result.spent
    limit = f" of a budget of {pair.wish.budget:g}" if pair.wish.budget else ""
    far = "; above 1 it is no bound for the picture as a whole" if spent > 1 else ""
    return (
        f"{pair.rule} changes the distribution. Its cost, {spent:.2f}{limit}, bounds in expectation by how much, "
        f"in total variation{far}."
    )


def _exact(pair: Pair) -> str:
    plain, fast = (canvas.result.work for canvas in (pair.plain, pair.fast))
    small = "which leaves a small gain where both cost about the same, as on a CPU"
    kept = f"here more than it saves, as {pair.fast.result.stats['acceptance']:.0%} of the drafts are kept"
    return (
        f"The exact rule keeps the distribution of one token per forward. It saves forwards of the transformer "
        f"({plain['passes']} → {fast['passes']}) and costs evaluations of the head, which tests every draft "
        f"({plain['evaluations']:,} → {_evaluations(fast):,}), {small if (pair.speed_up or 0) >= 1 else kept}."
    )


def _cspd(pair: Pair, measured: Mapping[str, Record]) -> str:
    stats = pair.fast.result.stats
    kept = (
        f"{stats['tested'] - stats['refused']:.0f} of {stats['tested']:.0f} drafted tokens stayed as the smaller MAR "
    )
    rule = f"{kept}drew them, by a rule that does not bound the distortion."
    record = measured.get(f"cspd-{pair.wish.window}")
    if record is None:
        return f"{rule} The bench has no record of this setting."
    return (
        f"{rule} Measured on {record['n']} pictures: Fréchet distance {record['fd_all']:.1f} to plain drawing, where "
        f"two plain runs are {record['noise']:.1f} apart, and {record['fd_real']:.1f} to real pictures."
    )


def _fewer(pair: Pair) -> str:
    if pair.fewer is None:
        return ""
    passes, seconds = pair.fewer
    return (
        f"Plain drawing in {passes} forwards, many tokens in each, took {duration(seconds)}. That is another "
        "distribution; if it is good enough, this is the time to beat."
    )


def _evaluations(work: Mapping[str, int]) -> int:
    return work["evaluations"] + work.get("draft_evaluations", 0)


def figures(pair: Pair) -> str:
    both = pair.plain, pair.fast
    rows = [
        ("time", *(duration(c.seconds) for c in both)),
        ("to the first token", *(duration(c.first) for c in both)),
        ("tokens", *(str(c.count) for c in both)),
        ("forwards, including the prefill", *(str(forwards(c)) for c in both)),
        ("tokens per forward", *(f"{per_forward(c):.2f}" for c in both)),
    ]
    result = pair.fast.result
    if pair.wish.method not in OF_MAR:
        rows += [("tokens accepted from drafts", "–", str(result.stats.accepted) if result else "–")]
    elif result and pair.plain.result:
        work, stats = (pair.plain.result.work, result.work), result.stats
        rows += [
            ("rows in them", *(f"{w['rows']:,}" for w in work)),
            ("forwards of the smaller MAR", "–", f"{work[1].get('draft_passes', 0):,}"),
            ("evaluations of the head, tokens times steps", *(f"{_evaluations(w):,}" for w in work)),
            ("drafts tested", "–", f"{stats.get('tested', 0):.0f}"),
            ("drafts kept", "–", f"{stats.get('tested', 0) - stats.get('refused', 0):.0f}"),
            ("mean acceptance probability", "–", f"{stats.get('acceptance', 0):.0%}"),
        ]
    return look.table(rows)
