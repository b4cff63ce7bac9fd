"""The image tabs: draw a prompt or a class by plain decoding and with drafts, exactly or by a relaxed rule."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from mmspec.app.demo import easel as easels
from mmspec.app.demo import image_view, look
from mmspec.app.demo.answer import MAX_PROMPT
from mmspec.app.demo.desk import Desk
from mmspec.app.demo.easel import COUPLED, FAMILIES, LOSSLESS, RANGES, SEED_EXACT, STEPS, Easel, Pair, Studio, Wish
from mmspec.app.demo.tab import QUICK, Tab, buttons, connect
from mmspec.app.painter import unknown_words

MARKS = "(on) => { document.getElementById('mm-paint-race').dataset.marks = on; }"


class Image(Tab[Pair]):
    """The events of a tab that draws prompts, or classes of a MAR.

    Args:
        own: whether the model is the embedded one, which knows few words.
    """

    def __init__(self, easel: Easel, desk: Desk, own: bool = False) -> None:
        super().__init__(easel, desk)
        self.easel, self.own, self.classes = easel, own, isinstance(easel, Studio)
        self.name = "class" if self.classes else "paint"
        note = look.hint(f"Both pictures are {escape(easel.note)}.") if easel.note else ""
        self.start = look.hint(image_view.START.format("class" if self.classes else "prompt")) + note

    def wish(self, *values: Any) -> Wish:
        return Wish(**dict(zip(self.easel.asks, values, strict=True)))

    def empty(self) -> str:
        return image_view.stage(self.easel.pair(Wish("", self.easel.usual)), self.easel.ordered)

    def look(self, both: Pair) -> tuple[str, str, str]:
        words = unknown_words([both.wish.prompt]) if self.own else []
        unknown = f"This model does not know: {escape(', '.join(words))}." if words else ""
        headline = image_view.headline(both, getattr(self.easel, "measured", None), unknown)
        return headline, image_view.stage(both, self.easel.ordered), image_view.figures(both)


def build(easel: Easel, desk: Desk, prompts: Sequence[str] = (), own: bool = False) -> Image:
    """Build a tab in the current page and connect its events."""
    image = Image(easel, desk, own)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            if image.classes:
                names = easel.subject.names
                wished: Any = gr.Dropdown(names, value=names[0], label="Class", filterable=True, elem_id="mm-class")
            else:
                wished = _prompt(easel, prompts)
            draw, stop = buttons("Draw", ("mm-sketch", "mm-sketch-halt") if image.classes else ("mm-draw", "mm-halt"))
            inputs = [wished, *(_drafts if image.classes else _method)(easel), *_sampling(easel)]
            if len(prompts) > 1:
                ready = [[text] for text in prompts]
                gr.Examples(ready, [wished], label="Prompts", elem_id="mm-wishes", api_visibility="private")
        with gr.Column(scale=5, min_width=320):
            marks = gr.Checkbox(
                True, label="marks", container=False, scale=0, min_width=110, elem_id="mm-marks", render=False
            )
            panes = image.build_panes(image_view.LEGEND, marks) if easel.ordered else image.build_panes("")
    triggers = [draw.click] if image.classes else [draw.click, wished.submit]
    connect(image, triggers, image.run, inputs, panes, panes, [draw, stop])
    stop.click(image.stop, None, None, **QUICK)
    if easel.ordered:
        marks.change(None, marks, js=MARKS, **QUICK)
    return image


def _prompt(easel: Easel, prompts: Sequence[str]) -> gr.Textbox:
    classes = easel.subject.classes
    return gr.Textbox(
        prompts[0] if prompts else "", label=f"Class, 0 to {classes - 1}" if classes else "Prompt",
        lines=2, max_lines=5, max_length=MAX_PROMPT, placeholder="What to draw", elem_id="mm-wish",
    )  # fmt: skip


def _drafts(easel: Easel) -> list[Component]:
    """The settings of a MAR's drafts: method, window, prefill."""
    return [
        gr.Dropdown(easel.methods, value=easel.usual, label="Rule and drafts", elem_id="mm-mode"),
        gr.Slider(*easel.windows, 4, step=1, label="Ahead", info="tokens drafted in a round"),
        gr.Slider(0, 1, 0, step=0.05, label="Prefill", info="share of tokens drawn before drafting begins"),
    ]


def _method(easel: Easel) -> list[Component]:
    """The settings of drafts and of a relaxed rule: method, window, rule, boldness, budget."""
    method = gr.Dropdown(easel.methods, value=SEED_EXACT, label="Method", elem_id="mm-method")
    window = gr.Slider(*easel.windows, 16, step=1, label="Window", info="tokens verified in one forward")
    rule = gr.Dropdown(
        [("exact: the distribution is kept", LOSSLESS), *((f"{name}, lossy", name) for name in FAMILIES)],
        value=LOSSLESS, label="Rule", elem_id="mm-rule",
        info="a relaxed rule accepts more drafts and changes the distribution; its cost is shown",
    )  # fmt: skip
    boldness = gr.Slider(1, STEPS, 2, step=1, label="Boldness", info="of the rule, from mild to bold", visible=False)
    budget = gr.Number(0, label="Budget", minimum=0, info="limit in total variation; 0: no limit", visible=False)

    def by_method(name: str) -> tuple[object, ...]:
        kept = gr.update(value=LOSSLESS) if easels.seed_exact(name) else gr.skip()
        return gr.update(interactive=name.startswith("jacobi")), kept

    def by_rule(name: str, method: str) -> tuple[object, ...]:
        """A seed-exact method does not allow a relaxed rule, so another method replaces it."""
        shown = gr.update(visible=name != LOSSLESS)
        return COUPLED if name != LOSSLESS and easels.seed_exact(method) else method, shown, shown

    method.input(by_method, method, [window, rule], **QUICK)
    rule.change(by_rule, [rule, method], [method, boldness, budget], **QUICK)
    return [method, window, rule, boldness, budget]


def _sampling(easel: Easel) -> list[Component]:
    with gr.Accordion("Sampling", open=False):
        fields: list[Component] = [
            gr.Number(0, label="Seed", precision=0, minimum=0, info="of both pictures"),
            gr.Slider(
                *RANGES["guidance"], easel.guidance, step=0.5, label="Guidance", info="how closely to follow the prompt"
            ),
        ]
        if easel.temperature is not None:
            fields.append(gr.Slider(0, 2, easel.temperature, step=0.05, label="Temperature",
                                   info="0 is greedy decoding"))  # fmt: skip
    return fields
