"""Pieces of HTML that the tabs share: numbers, times as bars, badges, pictures; pure functions."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from PIL import Image

DEEPEST = 6  # drafted tokens from this depth on share one green
STATES = {
    "waiting": "waiting", "reading": "reading …", "writing": "writing …", "drawing": "drawing …", "done": "done",
    "stopped": "stopped", "timed out": "time limit reached",
}  # fmt: skip
BUSY = ("reading", "writing", "drawing")
DEPTHS = "".join(f'<span class="mm-t mm-d{d}">{d}{"+" * (d == DEEPEST)}</span>' for d in range(1, DEEPEST + 1))


def shade(depth: int) -> str:
    """The class of what was drafted at a depth ≥ 1."""
    return f"mm-d{min(depth, DEEPEST)}"


def legend(*parts: str) -> str:
    said = "".join(f"<span>{part}</span>" for part in parts)
    return f'<div class="mm-legend" role="note" aria-label="what the colours mean">{said}</div>'


def header(title: str, about: str, state: str) -> str:
    return (
        f'<header><h3>{escape(title)}</h3><span class="mm-state">{STATES[state]}</span><p>{escape(about)}</p></header>'
    )


def section(title: str, state: str, body: str) -> str:
    busy = state in BUSY
    return (
        f'<section class="mm-pane{" mm-busy" * busy}" aria-label="{escape(title)}" aria-busy="{str(busy).lower()}">'
        f"{body}</section>"
    )


def figures(rows: Iterable[tuple[str, str, Any, str]]) -> str:
    """A grid of (name, value, whether it is known by now, note)."""
    cells = "".join(
        f"<div><dt>{name.replace('_', '_<wbr>')}</dt><dd>{value if known else '–'}</dd>"
        f'<dd class="mm-note">{note if known else ""}</dd></div>'
        for name, value, known, note in rows
    )
    return f'<dl class="mm-numbers">{cells}</dl>'


def canvas(picture: Image.Image | None, cells: Sequence[str], side: int, label: str) -> str:
    """The picture so far under side² cells, each of a class; those that are still to come have none."""
    image = "" if picture is None else f'<img src="{inline(picture)}" alt="the picture so far">'
    drawn = "".join(f'<i class="{cell}"></i>' if cell else "<i></i>" for cell in cells)
    return (
        f'<div class="mm-canvas">{image}<div class="mm-cells" style="--n:{side}" role="img" aria-label="{label}">'
        f"{drawn}</div></div>"
    )


def times(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One bar a row on a common scale, of (name of the part, seconds); the parts' names are classes, too."""
    most = max(sum(seconds for _, seconds in parts) for _, parts in rows) or 1.0
    lines = []
    for name, parts in rows:
        total = sum(seconds for _, seconds in parts)
        bars = "".join(
            f'<i class="mm-{part}" style="--w:{100 * seconds / most:.2f}%" title="{part} {duration(seconds)}"></i>'
            for part, seconds in parts
            if seconds > 0
        )
        told = ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts if seconds > 0)
        lines.append(
            f'<li aria-label="{escape(name)}: {told}"><span>{escape(name)}</span><span class="mm-lane">{bars}</span>'
            f"<b>{duration(total) if total else '–'}</b></li>"
        )
    names = dict.fromkeys(part for _, parts in rows for part, _ in parts)
    keys = "".join(f'<span><i class="mm-{part}"></i>{part}</span>' for part in names)
    return f'<div class="mm-times"><ol>{"".join(lines)}</ol><p aria-hidden="true">{keys}</p></div>'


def summary(speed_up: float | None, about: str, bars: str, badge: str, *small: str) -> str:
    """The headline, green only where it is a gain; with what it says, bars, a badge and notes."""
    big = "–" if speed_up is None else f"{speed_up:.2f}×"
    gain = " mm-gain" * (speed_up is not None and speed_up >= 1)
    notes = "".join(f'<p class="mm-small">{note}</p>' for note in small if note)
    return (
        f'<div class="mm-summary"><div class="mm-left"><p class="mm-speed{gain}"><strong>{big}</strong> '
        f'<span>{about}</span></p>{badge}{notes}</div><div class="mm-right">{bars}</div></div>'
    )


def badge(kind: str, words: str, final: bool) -> str:
    spoken = ' role="status"' * final
    return f'<p class="mm-badge mm-{kind}"{spoken}>{words}</p>'


def hint(words: str, role: str = "") -> str:
    spoken = f' role="{role}"' * bool(role)
    return f'<div class="mm-summary"><p class="mm-hint"{spoken}>{words}</p></div>'


FAILED = "This could not be run: the page sent what the demo does not take. Reload the page and try again."


def waiting() -> str:
    return hint("Waiting for the model …", "status")


def refusal(message: str) -> str:
    return f'<div class="mm-summary"><p class="mm-badge mm-different" role="alert">{escape(message)}</p></div>'


def inline(picture: Image.Image, kind: str = "PNG") -> str:
    """A picture as an address that holds it."""
    into = io.BytesIO()
    picture.save(into, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(into.getvalue()).decode()}"


def duration(seconds: float) -> str:
    """12.3 ms, 456 ms, 1.23 s, 12.3 s."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
