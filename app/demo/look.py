"""HTML that the tabs share: the headline, the stage where a race is replayed, badges; pure functions.

Every animated part has its time as `--t`; the style sheet shows it then, so that both sides share one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mmspec.app.demo.race import DONE, RUNNING, RaceSide, RaceView
from mmspec.app.demo.race import WAITING as BEFORE

LONGEST = 12.0  # maximum seconds of a replay; longer runs are replayed faster, both sides alike
FAILED = "This could not be run: the page sent invalid values. Reload the page and try again."
NO_FIGURES = "Figures appear after a run."


def speed_factor(both: RaceView[RaceSide]) -> float:
    """The factor by which a replay is faster than the run."""
    return max(1.0, max(both.plain.seconds, both.fast.seconds) / LONGEST)


def stage(both: RaceView[RaceSide], sides: Sequence[tuple[str, str, str]]) -> str:
    """Both sides next to each other, each as (title, description, body), with time bars on a common scale."""
    fast = speed_factor(both)
    longest = max(both.plain.seconds, both.fast.seconds) or 1.0
    panes = "".join(
        f'<section class="mm-pane" aria-label="{escape(title)}"><header><h3>{escape(title)}</h3>{_clock(one, fast)}'
        f'<p>{escape(about)}</p></header><div class="mm-lane">{_lane(one, longest, fast)}</div>{body}</section>'
        for one, (title, about, body) in zip((both.plain, both.fast), sides, strict=True)
    )
    return f'<div class="mm-race">{panes}</div>'


def _lane(one: RaceSide, longest: float, fast: float) -> str:
    """The time bar; empty before a run, since an existing element would not be animated again."""
    if not one.seconds:
        return ""
    return f'<i style="--w:{100 * one.seconds / longest:.1f}%;--for:{one.seconds / fast:.3f}"></i>'


def _clock(one: RaceSide, fast: float) -> str:
    if one.state in (BEFORE, RUNNING):
        return ""
    text = duration(one.seconds) if one.state == DONE else one.state
    return f'<b class="mm-clock" {moment(one.seconds, fast)}>{text}</b>'


def moment(seconds: float, fast: float) -> str:
    """The HTML attribute that says when an element appears in the replay."""
    return f'style="--t:{seconds / fast:.3f}"'


def pace(both: RaceView[RaceSide]) -> str:
    """A note on the speed of the replay, if it is not the original one."""
    fast = speed_factor(both)
    return f"Replayed {fast:.1f}× as fast as it ran." if fast > 1 else ""


def headline(speed_up: float | None, per_forward: float, of: str, badge: str, *small: str) -> str:
    """The speed-up, green if it is a gain; tokens per forward; the badge; and notes."""
    big = "–" if speed_up is None else f"{speed_up:.2f}×"
    gain = ' class="mm-gain"' * (speed_up is not None and speed_up >= 1)
    words = "the speed" if speed_up is not None and speed_up < 1 else "as fast"
    notes = "".join(f'<p class="mm-small">{note}</p>' for note in small if note)
    return (
        f'<div class="mm-summary"><p{gain}><strong>{big}</strong> {words}</p>'
        f"<p><strong>{per_forward:.2f}</strong> tokens per {of}</p>{badge}{notes}</div>"
    )


def badge(kind: str, words: str, final: bool) -> str:
    spoken = ' role="status"' * final
    return f'<p class="mm-badge mm-{kind}"{spoken}>{words}</p>'


def hint(words: str, spoken: str = "") -> str:
    return f'<div class="mm-summary"><p class="mm-hint"{spoken}>{words}</p></div>'


WAITING = hint("Waiting for the model …", ' role="status"')


def measuring(both: RaceView[RaceSide]) -> str:
    """The progress of the run that is being measured."""
    name, one = ("mmspec", both.fast) if both.plain.state != RUNNING else ("plain", both.plain)
    return hint(f"Measuring {name}: {one.count} tokens in {duration(one.seconds)}. The replay follows.")


def refusal(message: str) -> str:
    return f'<div class="mm-summary"><p class="mm-badge mm-different" role="alert">{escape(message)}</p></div>'


def legend(*parts: str) -> str:
    spans = "".join(f"<span>{part}</span>" for part in parts)
    return f'<div class="mm-legend" role="note" aria-label="what the colours mean">{spans}</div>'


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table of (name, plain, mmspec)."""
    return "\n".join(["| | plain | mmspec |", "|---|--:|--:|", *(f"| {' | '.join(row)} |" for row in rows)])


def duration(seconds: float) -> str:
    """12.3 ms, 456 ms, 1.23 s, 12.3 s."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
