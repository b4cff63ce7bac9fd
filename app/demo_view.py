"""The caption tab's HTML: coloured tokens, live numbers, the comparison; a pure function of what there is to see."""

from __future__ import annotations

from html import escape

from mmspec.app.demo_answer import (
    DONE,
    DRAFTED,
    OWN,
    PLAIN,
    READING,
    STOPPED,
    TIMED_OUT,
    WAITING,
    WRITING,
    Answer,
    Token,
    Turn,
)

DEEPEST = 6  # drafted tokens from this depth on share one green
STATES = {
    WAITING: "waiting", READING: "reading the picture …", WRITING: "writing …", DONE: "done", STOPPED: "stopped",
    TIMED_OUT: "time limit reached",
}  # fmt: skip
LEGEND = (
    '<div class="mm-legend" role="note" aria-label="colours of the tokens">'
    + '<span><span class="mm-t mm-plain">plain</span> one target call each</span>'
    + "<span>"
    + "".join(f'<span class="mm-t mm-d{d}">{d}{"+" * (d == DEEPEST)}</span>' for d in range(1, DEEPEST + 1))
    + " drafted and accepted, by depth</span>"
    + '<span><span class="mm-t mm-own">own</span> the target\'s own token after them</span></div>'
)
EMPTY = '<p class="mm-hint">The answer appears here, token by token.</p>'
START = (
    '<div class="mm-summary"><p class="mm-hint">Choose a picture and press <b>Run</b>. The same question is answered '
    "twice, one after the other: by stock <code>generate</code>, then with mmspec.</p></div>"
)


def token(one: Token) -> str:
    """One token in its colour, the blanks before it left white; one without text, such as the last, still counts."""
    if one.kind == DRAFTED:
        shade, about = f"mm-d{min(one.depth, DEEPEST)}", f"drafted, depth {one.depth}"
    else:
        shade, about = {OWN: ("mm-own", "the target's own"), PLAIN: ("mm-plain", "plain")}[one.kind]
    seen = one.text.lstrip()
    silent = " mm-silent" * (not seen)
    blanks = one.text[: len(one.text) - len(seen)]
    return f'{blanks}<span class="mm-t {shade}{silent}" title="{about}">{escape(seen)}</span>'


def pane(answer: Answer, title: str, about: str) -> str:
    """One answer with its numbers."""
    body = "".join(map(token, answer.tokens)) if answer.tokens else EMPTY
    busy = answer.state in (READING, WRITING)
    return (
        f'<section class="mm-pane{" mm-busy" * busy}" aria-label="{escape(title)}" aria-busy="{str(busy).lower()}">'
        f'<header><h3>{escape(title)}</h3><span class="mm-state">{STATES[answer.state]}</span>'
        f"<p>{escape(about)}</p></header>{_numbers(answer)}"
        f'<div class="mm-text" tabindex="0" role="region" aria-label="{escape(title)}: text">{body}</div>'
        f"{_calls(answer) if answer.accelerated else ''}</section>"
    )


def _numbers(answer: Answer) -> str:
    calls, known, count = len(answer.gains), bool(answer.at), len(answer.tokens)
    first = f"{duration(answer.prefill)} prefill incl. vision + {duration(answer.first - answer.prefill)}"
    drafted = f"{answer.accepted} accepted" if answer.accelerated else "nothing is drafted"
    rows = [  # name, value, whether it is known by now, note
        ("tokens/s", number(answer.tokens_per_second), known, "prefill included"),
        ("all tokens", duration(answer.seconds), known, f"{count} token{'s' * (count != 1)}"),
        ("time to first token", duration(answer.first), known, first),
        ("tokens_per_target_call", f"{answer.tokens_per_target_call:.2f}", calls, "own token included"),
        ("accepted_draft_tokens_per_call", f"{answer.accepted_draft_tokens_per_call:.2f}", calls, drafted),
        ("target calls", str(calls), calls, "after the prefill"),
    ]
    cells = "".join(
        f"<div><dt>{name.replace('_', '_<wbr>')}</dt><dd>{value if seen else '–'}</dd>"
        f'<dd class="mm-note">{note if seen else ""}</dd></div>'
        for name, value, seen, note in rows
    )
    return f'<dl class="mm-numbers">{cells}</dl>'


def _calls(answer: Answer) -> str:
    """A column for each target call: as high as the tokens it gave."""
    if not answer.gains:
        return ""
    most = max(answer.gains)
    columns = "".join(f'<i style="--h:{gain / most:.2f}"></i>' for gain in answer.gains)
    mean = sum(answer.gains) / len(answer.gains)
    label = f"tokens from each of {len(answer.gains)} target calls: {mean:.1f} on average, {most} at most"
    return f'<figure class="mm-calls"><div aria-hidden="true">{columns}</div><figcaption>{label}</figcaption></figure>'


def summary(turn: Turn) -> str:
    """The speed-up and whether the output is the same."""
    total, decode = turn.speed_up(), turn.speed_up(after=1)
    if total is None:
        big, about = "–", "the accelerated answer comes after the plain one"
    else:
        big = f"{total:.2f}×"
        n = turn.compared
        spent = f"{duration(turn.plain.at[n - 1])} → {duration(turn.fast.at[n - 1])}"
        about = f"{'faster' if total >= 1 else 'the speed'} to token {n}: {spent}"
        about += f"; without the first token's wait {decode:.2f}×" if decode else ""
    kind, words = verdict(turn)
    spoken = ' role="status"' * turn.over
    return (
        f'<div class="mm-summary"><p class="mm-speed"><strong>{big}</strong> <span>{about}</span></p>'
        f'<div><p class="mm-badge mm-{kind}"{spoken}>{words}</p>'
        f'<p class="mm-small">Preparing picture and prompt, once for both, took {duration(turn.prepared)} more.</p>'
        "</div></div>"
    )


def verdict(turn: Turn) -> tuple[str, str]:
    """(same, different, chance, partial or open; the words of the badge)."""
    n = turn.compared
    if turn.sampled:
        return "chance", (
            "Drawn at random: both answers follow the same law, but with the same seed they are not comparable token "
            "by token. Set the temperature to 0 to compare them."
        )
    if turn.difference is not None:
        where, gap = turn.difference
        near = "" if gap is None else f"; there the two best logits of stock generate differ by {gap:.2e}"
        return "different", f"First difference at token {where + 1}{near}"
    if not turn.over:
        return "open", "not compared yet"
    if turn.plain.state == turn.fast.state == DONE:
        return "same", f"✓ identical output: {n} of {n} tokens"
    if n == 0:
        return "open", "nothing to compare"
    return "partial", f"identical as far as both went: {n} token{'s' * (n != 1)}"


def refusal(message: str) -> str:
    return f'<div class="mm-summary"><p class="mm-badge mm-different" role="alert">{escape(message)}</p></div>'


def waiting() -> str:
    return '<div class="mm-summary"><p class="mm-hint" role="status">Waiting for the model …</p></div>'


def duration(seconds: float) -> str:
    """12.3 ms, 456 ms, 1.23 s, 12.3 s."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
