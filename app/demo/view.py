"""The caption tab's HTML: coloured tokens, live numbers, the comparison; a pure function of what there is to see."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from PIL import Image

from mmspec.app.demo import look
from mmspec.app.demo.answer import CORRECTED, DONE, DRAFTED, OWN, PLAIN, ChatTurn, ShownAnswer, Token, Turns
from mmspec.app.demo.look import duration, number

THUMB = 96  # pixels of the longer side of a frame
OTHERS = {  # tokens that were not drafted: (class, what they are)
    CORRECTED: ("mm-corrected", "corrected: the target's own, where the draft had another"),
    OWN: ("mm-own", "the target's own, after the draft"),
    PLAIN: ("mm-plain", "plain"),
}
LEGEND = look.legend(
    '<span class="mm-t mm-plain">plain</span> one call each',
    f"{look.DEPTHS} drafted and accepted, by depth",
    '<span class="mm-t mm-corrected">corrected</span> draft refused',
    '<span class="mm-t mm-own">own</span> draft used up',
)
EMPTY = '<p class="mm-hint">The answer appears here, token by token.</p>'
START = look.hint(
    "Choose a picture and press <b>Run</b>. The same question is answered twice, one after the other: by stock "
    "<code>generate</code>, then with mmspec."
)


def token(one: Token) -> str:
    """One token in its colour, the blanks before it left white; one without text, such as the last, still counts."""
    if one.kind == DRAFTED:
        shade, about = look.shade(one.depth), f"drafted, depth {one.depth}"
    else:
        shade, about = OTHERS[one.kind]
    seen = one.text.lstrip()
    silent = " mm-silent" * (not seen)
    blanks = one.text[: len(one.text) - len(seen)]
    return f'{blanks}<span class="mm-t {shade}{silent}" title="{about}">{escape(seen)}</span>'


def pane(answer: ShownAnswer, title: str, about: str) -> str:
    """One answer with its numbers."""
    body = "".join(map(token, answer.tokens)) if answer.tokens else EMPTY
    return look.section(title, answer.state, (
        f"{look.header(title, about, answer.state)}{_numbers(answer)}"
        f'<div class="mm-text" tabindex="0" role="region" aria-label="{escape(title)}: text">{body}</div>'
        f"{calls(answer.gains, 'model calls') if answer.accelerated else ''}"
    ))  # fmt: skip


def _numbers(answer: ShownAnswer) -> str:
    rounds, known, count = len(answer.gains), bool(answer.at), len(answer.tokens)
    read = f"{duration(answer.prefill - answer.vision)} prefill" + " incl. vision" * (not answer.vision)
    seen = f"{duration(answer.vision)} vision + " if answer.vision else ""
    first = f"{seen}{read} + {duration(answer.first - answer.prefill)} for the token"
    drafted = f"{answer.accepted} accepted" if answer.accelerated else "nothing is drafted"
    return look.figures([
        ("tokens/s", number(answer.tokens_per_second), known, "prefill included"),
        ("all tokens", duration(answer.seconds), known, f"{count} token{'s' * (count != 1)}{', cut off' * answer.cut}"),
        ("time to first token", duration(answer.first), known, first),
        ("tokens per model call", f"{answer.tokens_per_target_call:.2f}", rounds, "own token included"),
        ("drafted tokens accepted per call", f"{answer.accepted_draft_tokens_per_call:.2f}", rounds, drafted),
        ("model calls", str(rounds), rounds, "after the prefill"),
    ])  # fmt: skip


def calls(gains: Sequence[int], name: str) -> str:
    """A column for each target call: as high as the tokens it gave."""
    if not gains:
        return ""
    most = max(gains)
    columns = "".join(f'<i style="--h:{gain / most:.2f}"></i>' for gain in gains)
    label = f"tokens from each of {len(gains)} {name}, {most} at most"
    return f'<figure class="mm-calls"><div aria-hidden="true">{columns}</div><figcaption>{label}</figcaption></figure>'


def summary(turn: ChatTurn) -> str:
    """The speed-up, where the time went, and whether the output is the same."""
    total, decode = turn.speed_up(), turn.speed_up(after=1)
    if total is None:
        about = "the accelerated answer comes after the plain one"
    else:
        n = turn.compared
        about = f"{'as fast' if total >= 1 else 'the speed'} to token {n}"
        about += f"; {decode:.2f}× without the wait for the first" if decode else ""
    ready = f"Preparing {turn.ask.noun} and prompt, once for both, took {duration(turn.prepared)} more."
    cut = f"Cut off at {turn.ask.max_new_tokens} tokens; New tokens in the options allows more."
    bars = look.times([("plain", _parts(turn.plain)), ("mmspec", _parts(turn.fast))])
    return look.summary(total, about, bars, look.badge(*acceptance(turn), turn.over), cut * turn.plain.cut, ready)


def _parts(answer: ShownAnswer) -> list[tuple[str, float]]:
    """Where the time of an answer went so far."""
    read = answer.prefill - answer.vision if answer.prefill else 0.0
    return [("vision", answer.vision), ("prefill", read), ("decode", max(0.0, answer.seconds - answer.prefill))]


def acceptance(turn: ChatTurn) -> tuple[str, str]:
    """(same, different, chance, partial or open; the words of the badge)."""
    n = turn.compared
    if not turn.ask.comparable:
        return "chance", (
            "Drawn at random: both answers follow one distribution, but with noise of their own. Tick “same draws” or "
            "set the temperature to 0 to compare them token by token."
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


def talk(before: Turns, prompt: str, frames: Sequence[Image.Image]) -> str:
    """What was said before, and the frames of a video that the model looks at."""
    shown = ""
    if frames:
        small: list[str] = []
        for frame in frames:
            little = frame.copy()
            little.thumbnail((THUMB, THUMB))
            small.append(f'<img src="{look.inline(little, "JPEG")}" alt="frame {len(small) + 1}">')
        said = f"{len(frames)} frame{'s' * (len(frames) != 1)} that the model looks at"
        shown = f'<figure class="mm-frames"><div>{"".join(small)}</div><figcaption>{said}</figcaption></figure>'
    if not before:
        return shown
    lines = "".join(
        f'<li class="mm-asked">{escape(asked)}</li><li class="mm-answered">{escape(answered)}</li>'
        for asked, answered in before
    )
    return (
        f'{shown}<ol class="mm-talk" aria-label="conversation">{lines}<li class="mm-asked">{escape(prompt)}</li></ol>'
    )
