"""HTML for a turn of the Caption tab: both texts, the headline, the figures; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from PIL import Image

from mmspec.app.demo import look
from mmspec.app.demo.answer import CORRECTED, DRAFTED, OWN, PLAIN, ChatTurn, ShownAnswer, Token, Turns
from mmspec.app.demo.look import duration
from mmspec.app.files import inline

THUMB = 96  # pixels of the longer side of a frame
KINDS = {  # kinds of tokens
    PLAIN: "one call of the model",
    DRAFTED: "drafted, and accepted",
    CORRECTED: "corrected: the model's own, where the draft had another",
    OWN: "the model's own, after the draft",
}
LEGEND = look.legend(
    '<span class="mm-t mm-own mm-call" data-n="5">a call begins</span> and gives 5 tokens',
    '<span class="mm-t mm-drafted">drafted</span> and accepted',
    '<span class="mm-t mm-own">own</span> the model\'s, after the draft',
    '<span class="mm-t mm-corrected">corrected</span> draft refused',
)
EMPTY = '<p class="mm-hint">The answer appears here, token by token.</p>'
START = look.hint(
    "Choose a picture and press <b>Run</b>. Stock <code>generate</code> and mmspec answer the same question, one after "
    "the other; then both answers are replayed side by side, each at the pace that was measured."
)


def token(one: Token, at: float = 0.0, fast: float = 1.0) -> str:
    """One token in its colour, except leading blanks; a token without text, such as the end token, is also marked."""
    seen = one.text.lstrip()
    silent = " mm-silent" * (not seen)
    blanks = one.text[: len(one.text) - len(seen)]
    call = f' mm-call" data-n="{one.begins}' if one.begins and one.kind != PLAIN else ""
    return (
        f'{blanks}<span class="mm-t mm-{one.kind}{silent}{call}" title="{KINDS[one.kind]}" '
        f"{look.moment(at, fast)}>{escape(seen)}</span>"
    )


def text(answer: ShownAnswer, title: str, fast: float) -> str:
    body = "".join(token(one, at, fast) for one, at in zip(answer.tokens, answer.at, strict=True)) or EMPTY
    return f'<div class="mm-text" tabindex="0" role="region" aria-label="{title}: text">{body}</div>'


def stage(turn: ChatTurn) -> str:
    fast = look.speed_factor(turn)
    return look.stage(turn, (
        ("Plain", "stock generate: one call of the model for each token", text(turn.plain, "Plain", fast)),
        ("mmspec", f"{turn.ask.drafter} drafts ahead; one call checks the whole draft",
         text(turn.fast, "mmspec", fast)),
    ))  # fmt: skip


def headline(turn: ChatTurn) -> str:
    """The speed-up to the last token that both have, tokens per forward, and whether the output is the same."""
    cut = f"Cut off at {turn.ask.max_new_tokens} tokens; New tokens in the options allows more." * turn.plain.cut
    badge = look.badge(*acceptance(turn), turn.over)
    return look.headline(turn.speed_up(), turn.fast.tokens_per_target_call, "forward", badge, cut, look.pace(turn))


def figures(turn: ChatTurn) -> str:
    """A table of times, forwards and accepted tokens."""
    both = turn.plain, turn.fast
    decode = turn.speed_up(after=1)
    return look.table([
        ("tokens", *(f"{len(a.tokens)}{', cut off' * a.cut}" for a in both)),
        ("whole answer", *(duration(a.seconds) for a in both)),
        ("to the first token", *(duration(a.first) for a in both)),
        ("of it the vision tower", *(duration(a.vision) if a.vision else "–" for a in both)),
        ("of it the rest of the prefill", *(duration(max(0.0, a.prefill - a.vision)) for a in both)),
        ("tokens/s, prefill included", *(f"{len(a.tokens) / a.at[-1]:.1f}" if a.at else "–" for a in both)),
        ("speed-up without the wait for the first token", "1", f"{decode:.2f}×" if decode else "–"),
        ("forwards after the prefill", *(str(a.rounds) for a in both)),
        ("tokens per forward, its own included", *(f"{a.tokens_per_target_call:.2f}" for a in both)),
        ("drafted tokens accepted per forward", "–", f"{turn.fast.accepted_draft_tokens_per_call:.2f}"),
        (f"{turn.ask.noun} and prompt prepared, once for both", *[duration(turn.prepared)] * 2),
    ])  # fmt: skip


def acceptance(turn: ChatTurn) -> tuple[str, str]:
    """The badge as (same, different, chance, partial or open; its text)."""
    n = turn.compared
    if not turn.ask.comparable:
        return "chance", (
            "Sampled: both answers follow the same distribution, but with different noise. Tick “same draws” or "
            "set the temperature to 0 to compare them token by token."
        )
    if turn.difference is not None:
        where, gap = turn.difference
        near = "" if gap is None else f"; there the two best logits of stock generate differ by {gap:.2e}"
        return "different", f"First difference at token {where + 1}{near}"
    if not turn.over:
        return "open", "not compared yet"
    if turn.ended:
        return "same", f"✓ identical output: {n} of {n} tokens"
    if n == 0:
        return "open", "nothing to compare"
    return "partial", f"identical as far as both went: {n} token{'s' * (n != 1)}"


def talk(before: Turns, prompt: str, frames: Sequence[Image.Image]) -> str:
    """The conversation so far, and the frames of a video that the model sees."""
    shown = ""
    if frames:
        small: list[str] = []
        for frame in frames:
            little = frame.copy()
            little.thumbnail((THUMB, THUMB))
            small.append(f'<img src="{inline(little, "JPEG")}" alt="frame {len(small) + 1}">')
        caption = f"{len(frames)} frame{'s' * (len(frames) != 1)} that the model sees"
        shown = f'<figure class="mm-frames"><div>{"".join(small)}</div><figcaption>{caption}</figcaption></figure>'
    if not before:
        return shown
    lines = "".join(
        f'<li class="mm-asked">{escape(question)}</li><li class="mm-answered">{escape(answer)}</li>'
        for question, answer in before
    )
    return (
        f'{shown}<ol class="mm-talk" aria-label="conversation">{lines}<li class="mm-asked">{escape(prompt)}</li></ol>'
    )
