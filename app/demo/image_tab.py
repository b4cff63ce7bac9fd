"""The image tabs: a prompt or a class drawn by plain decoding and with drafts, exactly or by a relaxed rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from mmspec.app.demo import race as races
from mmspec.app.demo.captions import MAX_PROMPT
from mmspec.app.demo.images import CSPD, EXACT, OF_MAR, RELAXED, Drawing, ImageRace, MarRace, Pair, TokenGrid
from mmspec.app.demo.race import control, headline, hint, moment
from mmspec.app.files import inline

LEGEND = '<span><i class="mm-dot"></i> first token of a forward, which gives all tokens up to the next dot</span>'
START = (
    "Choose a {} and press <b>Draw</b>. The picture is drawn twice from the same seed, token by token and then with "
    "drafts; then both are replayed side by side, each at the pace that was measured."
)
KEPT = "kept", "✓ same distribution, lossless: another picture, with its own noise"


def run(race: ImageRace, *values: Any) -> Iterator[races.Shown]:
    """Draw; the values are the page's, see `fields`."""
    request = dict(zip(fields(race), values, strict=True))

    def look(pair: Pair) -> races.Shown:
        return show_headline(pair), show_pictures(pair)

    yield from races.run(race, lambda: race.pair(Drawing(**request)), look, empty(race))


def fields(race: ImageRace) -> list[str]:
    """The fields of a Drawing on the page, in order."""
    rule = [] if isinstance(race, MarRace) else ["rule"]
    return ["prompt", "method", "window", *rule, "seed", *race.sampling]


def empty(race: ImageRace) -> str:
    """The stage before a run."""
    return show_pictures(race.pair(Drawing(prompt="", method=race.usual)))


def build(race: ImageRace, prompts: Sequence[str] = ()) -> None:
    """Build a tab in the current page and connect its events."""
    mar = isinstance(race, MarRace)
    name = "class" if mar else "image"
    note = hint(f"Both pictures are {escape(race.note)}.") if race.note else ""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            prompt: Any = _prompt(race, prompts)
            draw, stop = races.buttons(name, "Draw")
            label = "Rule and drafts" if mar else "Method"
            method = gr.Dropdown(race.methods, value=race.usual, label=label, elem_id=f"mm-{name}-method")
            window = control(Drawing, "window", 4 if mar else None)
            rule = [] if mar else _rule(race.rules)
            with gr.Accordion("Sampling", open=False):
                sampling = [control(Drawing, field, value) for field, value in race.sampling.items()]
                inputs = [prompt, method, window, *rule, control(Drawing, "seed"), *sampling]
            if prompts:
                ready = [[text] for text in prompts]
                gr.Examples(ready, [prompt], label="Prompts", elem_id="mm-wishes", api_visibility="private")
        with gr.Column(scale=5, min_width=320):
            start = hint(START.format("class" if mar else "prompt"))
            panes = races.panes(name, start + note, empty(race), "" if mar else LEGEND)
    triggers = [draw.click] if mar else [draw.click, prompt.submit]
    races.connect(triggers, partial(run, race), inputs, panes, stop)


def _prompt(race: ImageRace, prompts: Sequence[str]) -> Component:
    classes = race.subject.classes
    if isinstance(race, MarRace):
        return gr.Dropdown(race.subject.names, value=race.subject.names[0], label="Class", elem_id="mm-class")
    return gr.Textbox(
        prompts[0] if prompts else "", label=f"Class, 0 to {classes - 1}" if classes else "Prompt", lines=2,
        max_lines=5, max_length=MAX_PROMPT, placeholder="What to draw", elem_id="mm-wish",
    )  # fmt: skip


def _rule(specs: Sequence[str]) -> list[Component]:
    choices = [("exact: the distribution is kept", EXACT), *((spec, spec) for spec in specs)]
    return [gr.Dropdown(
        choices, value=EXACT, label="Rule", allow_custom_value=True, elem_id="mm-rule",
        info="a relaxed rule accepts more drafts and changes the distribution; its cost is shown",
    )]  # fmt: skip


# --- HTML


def show_pictures(pair: Pair) -> str:
    fast, mar = races.speed_factor(pair), pair.drawing.method in OF_MAR  # a MAR's tokens come in any order
    boards = [_board(pair.plain, fast, False), _board(pair.fast, fast, not mar)]
    drafts = f"{pair.drawing.used}: one forward verifies many tokens"
    return races.stage(pair, ("one forward of the model for each token", drafts), boards)


def _board(picture: TokenGrid, fast: float, marked: bool) -> str:
    """The picture, revealed token by token; if `marked`, with a dot where a forward begins."""
    begins = set(picture.begins) if marked else set()
    cells = "".join(
        f"<i{' class=mm-call' * (place in begins)} {moment(at, fast)}></i>" if at else '<i class="mm-open"></i>'
        for place, at in enumerate(picture.at)
    )
    image = "" if picture.image is None else f'<img src="{inline(picture.image)}" alt="the picture">'
    label = f"{picture.count} of {len(picture.at)} tokens drawn, in {picture.forwards} forwards"
    return (
        f'<div class="mm-canvas">{image}<div class="mm-cells" style="--n:{round(len(picture.at) ** 0.5)}" role="img" '
        f'aria-label="{label}">{cells}</div></div>'
    )


def show_headline(pair: Pair) -> str:
    """The speed-up, tokens per forward, how the picture relates to the plain one, and the cost of a rule."""
    per_forward = pair.fast.count / max(1, pair.fast.forwards)
    return headline(pair, pair.speed_up, per_forward, acceptance(pair), _cost(pair) if pair.ended else "")


def acceptance(pair: Pair) -> tuple[str, str]:
    """The badge as (same, kept, different, lossy or open; its text)."""
    drawing, fast, total = pair.drawing, pair.fast, len(pair.fast.at)
    if not pair.ended:
        return "open", "nothing to compare"
    if drawing.method == CSPD:
        return "lossy", "approximate: a picture of another distribution"
    if not fast.result.lossless:
        [spent] = fast.result.spent
        return "lossy", f"lossy: cost {spent:.2f} in total variation, {spent / total:.3f} per token"
    if drawing.method in OF_MAR:
        return KEPT
    if pair.same == total:
        return "same", f"✓ the same picture: {total} of {total} tokens"
    if drawing.used in RELAXED or drawing.temperature == 0:
        return "different", f"another picture: {pair.same} of {total} tokens agree, where all should"
    return KEPT


def _cost(pair: Pair) -> str:
    """A note on what a relaxed rule costs, or on the work of a MAR."""
    result, drawing = pair.fast.result, pair.drawing
    if drawing.method == CSPD:
        kept = f"{result.stats['tested'] - result.stats['refused']:.0f} of {result.stats['tested']:.0f} drafted tokens"
        return (
            f"{kept} stayed as the smaller MAR drew them, by a rule that does not bound the "
            "distortion. The Results tab has measured Fréchet distances of some settings (mar-cspd)."
        )
    if drawing.method in OF_MAR:
        plain, fast = pair.plain.result.work, result.work
        return (
            f"The exact rule keeps the distribution of one token per forward. It saves forwards of the transformer "
            f"({plain['passes']} → {fast['passes']}) and costs evaluations of the head, which tests every draft: "
            "little gain where both cost the same, as on a CPU."
        )
    if result.lossless:
        return ""
    far = "; above 1 it is no bound for the picture as a whole" if result.spent[0] > 1 else ""
    cost = f"in expectation at most by this cost, in total variation{far}"
    return f"{escape(drawing.rule)} changes the distribution; {cost}."
