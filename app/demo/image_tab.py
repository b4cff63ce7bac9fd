"""The image tabs: a prompt or a class drawn by plain decoding and with drafts, exactly or by a relaxed rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from mmspec.app.demo import race_tab
from mmspec.app.demo.captions import MAX_PROMPT
from mmspec.app.demo.images import COUPLED, CSPD, EXACT, OF_MAR, RULES, SEED_EXACT, Drawing, ImageRace, Pair, TokenGrid
from mmspec.app.demo.images import seed_exact as is_seed_exact
from mmspec.app.demo.race_tab import QUICK, duration, headline, hint, moment, slider
from mmspec.app.files import inline
from mmspec.app.painter import unknown_words

FIELDS = {  # of a Drawing on the page, in order; by whether classes are drawn
    False: ("prompt", "method", "window", "rule", "boldness", "seed", "guidance", "temperature"),
    True: ("prompt", "method", "window", "prefill", "seed", "guidance"),
}
LEGEND = '<span><i class="mm-dot"></i> first token of a forward, which gives all tokens up to the next dot</span>'
START = (
    "Choose a {} and press <b>Draw</b>. The picture is drawn twice from the same seed, token by token and then with "
    "drafts; then both are replayed side by side, each at the pace that was measured."
)
KEPT = "kept", "✓ same distribution, lossless: another picture, with its own noise"


def run(race: ImageRace, own: bool, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Draw; the values are the page's, see `FIELDS`.

    Args:
        own: whether the model is the embedded one, which knows few words.
    """
    request = dict(zip(FIELDS[race.classes], values, strict=True))

    def look(pair: Pair) -> tuple[str, str, str]:
        words = unknown_words([pair.drawing.prompt]) if own else []
        unknown = f"This model does not know: {escape(', '.join(words))}." if words else ""
        return show_headline(pair, unknown), show_pictures(pair), show_figures(pair)

    yield from race_tab.run(race, lambda: race.pair(Drawing(**request)), look, empty(race))


def empty(race: ImageRace) -> str:
    """The stage before a run."""
    return show_pictures(race.pair(Drawing(prompt="", method=race.usual)))


def build(race: ImageRace, prompts: Sequence[str] = (), own: bool = False) -> None:
    """Build a tab in the current page and connect its events."""
    name = "class" if race.classes else "image"
    start = hint(START.format("class" if race.classes else "prompt"))
    note = hint(f"Both pictures are {escape(race.note)}.") if race.note else ""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            prompt = _prompt(race, prompts)
            draw, stop = race_tab.buttons(name, "Draw")
            inputs = [prompt, *(_drafts if race.classes else _method)(race), *_sampling(race)]
            if prompts:
                ready = [[text] for text in prompts]
                gr.Examples(ready, [prompt], label="Prompts", elem_id="mm-wishes", api_visibility="private")
        with gr.Column(scale=5, min_width=320):
            panes = race_tab.panes(name, start + note, empty(race), "" if race.classes else LEGEND)
    triggers = [draw.click] if race.classes else [draw.click, prompt.submit]
    race_tab.connect(triggers, partial(run, race, own), inputs, panes, stop)


def _prompt(race: ImageRace, prompts: Sequence[str]) -> Any:
    if race.classes:
        names = race.subject.names
        return gr.Dropdown(names, value=names[0], label="Class", elem_id="mm-class")
    classes = race.subject.classes
    return gr.Textbox(
        prompts[0] if prompts else "", label=f"Class, 0 to {classes - 1}" if classes else "Prompt", lines=2,
        max_lines=5, max_length=MAX_PROMPT, placeholder="What to draw", elem_id="mm-wish",
    )  # fmt: skip


def _drafts(race: ImageRace) -> list[Component]:
    """The settings of a MAR's drafts: method, window, prefill."""
    return [
        gr.Dropdown(race.methods, value=race.usual, label="Rule and drafts", elem_id="mm-mode"),
        slider(Drawing, "window", "Ahead", 4, info="tokens drafted in a round"),
        slider(Drawing, "prefill", "Prefill", step=0.05, info="share of tokens drawn before drafting begins"),
    ]


def _method(race: ImageRace) -> list[Component]:
    """The settings of drafts and of a relaxed rule: method, window, rule, boldness."""
    method = gr.Dropdown(race.methods, value=SEED_EXACT, label="Method", elem_id="mm-method")
    window = slider(Drawing, "window", "Window", info="tokens verified in one forward")
    rule = gr.Dropdown(
        [("exact: the distribution is kept", EXACT), *((f"{name}, lossy", name) for name in RULES)], value=EXACT,
        label="Rule", info="a relaxed rule accepts more drafts and changes the distribution; its cost is shown",
        elem_id="mm-rule",
    )  # fmt: skip
    boldness = slider(Drawing, "boldness", "Boldness", info="of the rule, from mild to bold", visible=False)

    def by_method(name: str) -> tuple[object, ...]:
        return gr.update(interactive=name.startswith("jacobi")), EXACT if is_seed_exact(name) else gr.skip()

    def by_rule(name: str, method: str) -> tuple[object, ...]:
        """A seed-exact method does not allow a relaxed rule, so another method replaces it."""
        relaxed = name != EXACT
        return COUPLED if relaxed and is_seed_exact(method) else method, gr.update(visible=relaxed)

    method.input(by_method, method, [window, rule], **QUICK)
    rule.change(by_rule, [rule, method], [method, boldness], **QUICK)
    return [method, window, rule, boldness]


def _sampling(race: ImageRace) -> list[Component]:
    with gr.Accordion("Sampling", open=False):
        fields: list[Component] = [
            gr.Number(0, label="Seed", precision=0, minimum=0, info="of both pictures"),
            slider(Drawing, "guidance", "Guidance", race.guidance, 0.5, info="how closely to follow the prompt"),
        ]
        if not race.classes:
            greedy = "0 is greedy decoding"
            fields.append(slider(Drawing, "temperature", "Temperature", race.temperature, 0.05, info=greedy))
    return fields


# --- HTML


def show_pictures(pair: Pair) -> str:
    fast, mar = race_tab.speed_factor(pair), pair.drawing.method in OF_MAR  # a MAR's tokens come in any order
    boards = [_board(pair.plain, fast, False), _board(pair.fast, fast, not mar)]
    drafts = f"{pair.drawing.method}: one forward verifies many tokens"
    return race_tab.stage(pair, ("one forward of the model for each token", drafts), boards)


def _board(picture: TokenGrid, fast: float, marked: bool) -> str:
    """The picture, revealed token by token; if `marked`, with a dot where a forward begins."""
    begins = set(picture.begins) if marked else set()
    cells = "".join(
        f"<i{' class=mm-call' * (place in begins)} {moment(at, fast)}></i>" if at else '<i class="mm-open"></i>'
        for place, at in enumerate(picture.at)
    )
    image = "" if picture.image is None else f'<img src="{inline(picture.image)}" alt="the picture">'
    label = f"{picture.count} of {len(picture.at)} tokens drawn, in {forwards(picture)} forwards"
    return (
        f'<div class="mm-canvas">{image}<div class="mm-cells" style="--n:{picture.grid}" role="img" '
        f'aria-label="{label}">{cells}</div></div>'
    )


def forwards(picture: TokenGrid) -> int:
    """The number of forwards; a MAR's forwards without new tokens are counted only at the end."""
    return getattr(picture.result, "work", {}).get("passes", len(picture.calls))


def per_forward(picture: TokenGrid) -> float:
    return picture.count / max(1, forwards(picture))


def show_headline(pair: Pair, *notes: str) -> str:
    """The speed-up, tokens per forward, how the picture relates to the plain one, and the cost of a rule."""
    if pair.ended:
        notes = (_cost(pair), *notes)
    return headline(pair, pair.speed_up, per_forward(pair.fast), acceptance(pair), *notes)


def acceptance(pair: Pair) -> tuple[str, str]:
    """The badge as (same, kept, different, lossy or open; its text)."""
    drawing, fast, total = pair.drawing, pair.fast, len(pair.fast.at)
    if not pair.ended:
        return "open", "nothing to compare"
    if drawing.method == CSPD:
        return "lossy", "approximate: a picture of another distribution"
    if drawing.rule != EXACT and drawing.temperature > 0:
        [spent] = fast.result.spent
        return "lossy", f"lossy: cost {spent:.2f} in total variation, {spent / total:.3f} per token"
    if drawing.method in OF_MAR:
        return KEPT
    if pair.same == total:
        return "same", f"✓ the same picture: {total} of {total} tokens"
    if drawing.same:
        return "different", f"another picture: {pair.same} of {total} tokens agree, where all should"
    return KEPT


def _cost(pair: Pair) -> str:
    """A note on what a relaxed rule costs, or on the work of a MAR."""
    result, drawing = pair.fast.result, pair.drawing
    if drawing.method == CSPD:
        kept = f"{result.stats['tested'] - result.stats['refused']:.0f} of {result.stats['tested']:.0f} drafted tokens"
        return (
            f"{kept} stayed as the smaller MAR drew them, by a rule that does not bound the distortion. For some "
            "settings the Drafters tab has the measured Fréchet distances."
        )
    if drawing.method in OF_MAR:
        plain, fast = pair.plain.result.work, result.work
        return (
            f"The exact rule keeps the distribution of one token per forward. It saves forwards of the transformer "
            f"({plain['passes']} → {fast['passes']}) and costs evaluations of the head, which tests every draft "
            f"({_evaluations(plain):,} → {_evaluations(fast):,}): little gain where both cost the same, as on a CPU."
        )
    if drawing.rule == EXACT:
        return ""
    far = "; above 1 it is no bound for the picture as a whole" if result.spent[0] > 1 else ""
    return f"{pair.rule} changes the distribution; in expectation at most by this cost, in total variation{far}."


def _evaluations(work: Mapping[str, int]) -> int:
    return work["evaluations"] + work.get("draft_evaluations", 0)


def show_figures(pair: Pair) -> str:
    both = pair.plain, pair.fast
    rows = [
        ("time", *(duration(p.seconds) for p in both)),
        ("to the first token", *(duration(p.first) for p in both)),
        ("tokens", *(str(p.count) for p in both)),
        ("forwards, including the prefill", *(str(forwards(p)) for p in both)),
        ("tokens per forward", *(f"{per_forward(p):.2f}" for p in both)),
    ]
    if pair.ended and pair.drawing.method not in OF_MAR:
        rows.append(("tokens accepted from drafts", "–", str(pair.fast.result.stats.accepted)))
    elif pair.ended:
        work, stats = [p.result.work for p in both], pair.fast.result.stats
        rows += [
            ("forwards of the smaller MAR", "–", f"{work[1].get('draft_passes', 0):,}"),
            ("evaluations of the head, tokens times steps", *(f"{_evaluations(w):,}" for w in work)),
            ("drafts kept", "–", f"{stats['tested'] - stats['refused']:.0f} of {stats['tested']:.0f}"),
        ]
    return race_tab.table(rows)
