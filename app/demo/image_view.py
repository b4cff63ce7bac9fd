"""The image tab's HTML: two pictures under their token grids, numbers, the comparison; a pure function of a Pair."""

from __future__ import annotations

from mmspec.app.demo import look
from mmspec.app.demo.answer import DONE
from mmspec.app.demo.canvas import Canvas, Pair
from mmspec.app.demo.look import duration
from mmspec.app.demo.view import calls
from mmspec.app.demo.wish import LOSSLESS

LEGEND = look.legend(
    '<span class="mm-t mm-plain">·</span> one forward each',
    f"{look.DEPTHS} drafted and accepted, by depth",
    '<span class="mm-t mm-own">·</span> the target\'s own',
)
START = look.hint(
    "Choose a prompt and press <b>Draw</b>. The picture is drawn twice from the same seed, one after the other: token "
    "by token, then with drafts."
)


def pane(canvas: Canvas, title: str, about: str) -> str:
    """One picture with its grid and numbers."""
    body = f"{look.header(title, about, canvas.state)}{easel(canvas)}{_numbers(canvas)}"
    return look.section(title, canvas.state, body + (calls(canvas.gains, "forwards") if canvas.accelerated else ""))


def easel(canvas: Canvas) -> str:
    """The picture, and above it one cell a token: whose it is, or that it is still to come."""
    own = "mm-own" if canvas.accelerated else "mm-plain"
    cells = [look.shade(depth) if depth else own for depth in canvas.depths]
    total = canvas.grid**2
    label = f"{len(cells)} of {total} tokens drawn, {canvas.accepted} of them accepted from drafts"
    return look.canvas(canvas.image, [*cells, *[""] * (total - len(cells))], canvas.grid, label)


def _numbers(canvas: Canvas) -> str:
    known, count = bool(canvas.tokens), len(canvas.tokens)
    accepted = f"{100 * canvas.accepted / max(count, 1):.0f} % of the tokens" if canvas.accelerated else "none drafted"
    return look.figures([
        ("seconds", duration(canvas.seconds), known, f"{duration(canvas.prefill)} to the first token"),
        ("forwards", str(canvas.forwards), known, "of the model"),
        ("tokens per forward", f"{count / max(canvas.forwards, 1):.2f}", known, f"{count} tokens"),
        ("accepted", str(canvas.accepted), known, accepted),
    ])  # fmt: skip


def summary(pair: Pair, *notes: str) -> str:
    """The speed-up, where the time went, and what the picture has to do with the plain one."""
    plain, fast = pair.plain, pair.fast
    if pair.speed_up is None:
        about = "the accelerated picture comes after the plain one"
    else:
        about = (
            f"as fast, with {plain.forwards / fast.forwards:.2f}× fewer forwards: {plain.forwards} → {fast.forwards}"
        )
    bars = look.times([(name, [("prefill", c.prefill), ("decode", max(0.0, c.seconds - c.prefill))])
                       for name, c in (("plain", plain), ("mmspec", fast))])  # fmt: skip
    return look.summary(pair.speed_up, about, bars, look.badge(*acceptance(pair), pair.over), *notes)


def acceptance(pair: Pair) -> tuple[str, str]:
    """(same, different, chance, lossy or open; the words of the badge)."""
    wish, fast, total = pair.wish, pair.fast, pair.fast.grid**2
    if wish.rule != LOSSLESS and wish.temperature > 0:
        return "lossy", f"lossy: {_distortion(pair)}"
    if not pair.over or pair.plain.state != DONE or fast.state != DONE:
        return "open", "nothing to compare" if pair.over else "not compared yet"
    if pair.same == total:
        return "same", f"✓ the same picture: {total} of {total} tokens"
    if wish.same:
        return "different", f"another picture: {pair.same} of {total} tokens agree, where all should"
    return (
        "chance",
        "another picture of the same distribution: lossless, but with noise of its own; seed-exact gives the same",
    )


def _distortion(pair: Pair) -> str:
    """What a relaxed rule did to the distribution, as far as it is known."""
    wish, fast = pair.wish, pair.fast
    limit = f" of a budget of {wish.budget:g}" if wish.budget else ""
    if fast.state != DONE:
        return f"{pair.rule} bends the distribution{limit.replace('of', 'within')}; by how much is told at the end"
    count = len(fast.tokens)
    over = "; above 1 it bounds nothing for the picture as a whole" if fast.spent > 1 else ""
    return f"{pair.rule} was charged {fast.spent:.2f}{limit} in total variation, {fast.spent / count:.3f} a token{over}"
