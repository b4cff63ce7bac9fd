"""The image tabs: a prompt or a class drawn by plain decoding and with drafts, exactly or by a relaxed rule."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from mmspec.app.demo import image_view, look
from mmspec.app.demo.answer import MAX_PROMPT
from mmspec.app.demo.canvas import Canvas, Easel, Pair
from mmspec.app.demo.desk import Desk
from mmspec.app.demo.sketch import MAX_AHEAD, ClassWish, Studio
from mmspec.app.demo.tab import QUICK, Tab, doors, tie
from mmspec.app.demo.wish import (
    COUPLED,
    FAMILIES,
    LOSSLESS,
    MAX_GUIDANCE,
    MAX_WINDOW,
    SEED_EXACT,
    STEPS,
    PromptWish,
    seed_exact,
)
from mmspec.app.painter import unknown_words

MARKS = "(on) => { document.getElementById('mm-paint-race').dataset.marks = on; }"


class Image(Tab):
    """The events of the tab that draws prompts."""

    name, start, wish = "paint", image_view.PROMPT_START, PromptWish

    def __init__(self, easel: Easel, desk: Desk, own: bool) -> None:
        super().__init__(easel, desk)
        self.easel, self.own = easel, own  # own: the embedded model, which knows few words

    def empty(self) -> str:
        return self._stage(Pair(Canvas.empty(self.easel.grid), Canvas.empty(self.easel.grid), PromptWish(""), ""))

    def _stage(self, pair: Pair) -> str:
        return image_view.stage(pair, f"{pair.wish.method}: one forward looks at many tokens", marked=True)

    def look(self, both: Pair) -> tuple[str, str, str]:
        words = unknown_words([both.wish.prompt]) if self.own else []
        unknown = f"This model does not know: {escape(', '.join(words))}." if words else ""
        return image_view.headline(both, unknown), self._stage(both), image_view.figures(both)


class Classes(Tab):
    """The events of the tab that draws the classes of a MAR."""

    name, wish = "class", ClassWish

    def __init__(self, studio: Studio, desk: Desk) -> None:
        super().__init__(studio, desk)
        note = look.hint(f"Both pictures are {escape(studio.note)}.") if studio.note else ""
        self.studio, self.start = studio, image_view.CLASS_START + note

    def empty(self) -> str:
        return self._stage(Pair(Canvas.empty(self.studio.grid), Canvas.empty(self.studio.grid), ClassWish(""), ""))

    def _stage(self, pair: Pair) -> str:
        return image_view.stage(pair, pair.wish.mode, marked=False)

    def look(self, both: Pair) -> tuple[str, str, str]:
        said = image_view.class_headline(both, self.studio.measured)
        return said, self._stage(both), image_view.class_figures(both)


def build(easel: Easel, desk: Desk, prompts: Sequence[str], own: bool) -> Image:
    """Lay the tab for prompts out in the page under construction and tie its events."""
    image = Image(easel, desk, own)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            prompt = gr.Textbox(
                prompts[0] if prompts else "", label="Prompt", lines=2, max_lines=5, max_length=MAX_PROMPT,
                placeholder="What to draw", elem_id="mm-wish",
            )  # fmt: skip
            if easel.painter.classes:
                prompt.label = f"Class, 0 to {easel.painter.classes - 1}"
            draw, stop = doors("Draw", ("mm-draw", "mm-halt"))
            inputs = [prompt, *_method(easel), *_sampling(easel.guidance, easel.temperature)]
            if len(prompts) > 1:
                ready = [[text] for text in prompts]
                gr.Examples(ready, [prompt], label="Prompts", elem_id="mm-wishes", api_visibility="private")
        with gr.Column(scale=5, min_width=320):
            marks = gr.Checkbox(
                True, label="marks", container=False, scale=0, min_width=110, elem_id="mm-marks", render=False
            )
            panes = image.lay(image_view.LEGEND, marks)
    tie(image, [draw.click, prompt.submit], image.run, inputs, panes, panes, [draw, stop])
    stop.click(image.stop, None, None, **QUICK)
    marks.change(None, marks, js=MARKS, **QUICK)
    return image


def _method(easel: Easel) -> list[Any]:
    """How to draft, and the knob that bends the distribution: method, window, rule, boldness, budget."""
    method = gr.Dropdown(list(easel.methods), value=SEED_EXACT, label="Method", elem_id="mm-method")
    window = gr.Slider(2, MAX_WINDOW, 16, step=1, label="Window", info="tokens that one forward looks at")
    rule = gr.Dropdown(
        [("exact: the distribution is kept", LOSSLESS), *((f"{name}, lossy", name) for name in FAMILIES)],
        value=LOSSLESS, label="Rule", elem_id="mm-rule",
        info="a relaxed rule keeps more drafts and changes the distribution; what it is charged is shown",
    )  # fmt: skip
    boldness = gr.Slider(1, STEPS, 2, step=1, label="Boldness", info="of the rule, from mild to bold", visible=False)
    budget = gr.Number(0, label="Budget", minimum=0, info="most total variation to spend; 0: no limit", visible=False)

    def by_method(name: str) -> tuple[Any, ...]:
        kept = gr.update(value=LOSSLESS) if seed_exact(name) else gr.skip()
        return gr.update(interactive=name.startswith("jacobi")), kept

    def by_rule(name: str, method: str) -> tuple[Any, ...]:
        """A seed-exact method draws plain decoding's own picture, so that another one has to take its place."""
        shown = gr.update(visible=name != LOSSLESS)
        return COUPLED if name != LOSSLESS and seed_exact(method) else method, shown, shown

    method.input(by_method, method, [window, rule], **QUICK)
    rule.change(by_rule, [rule, method], [method, boldness, budget], **QUICK)
    return [method, window, rule, boldness, budget]


def _sampling(guidance: float, temperature: float | None = None) -> list[Any]:
    with gr.Accordion("Sampling", open=False):
        found = [
            gr.Number(0, label="Seed", precision=0, minimum=0, info="of both pictures"),
            gr.Slider(1, MAX_GUIDANCE, guidance, step=0.5, label="Guidance", info="how closely to follow the wish"),
        ]
        if temperature is not None:
            found.append(gr.Slider(0, 2, temperature, step=0.05, label="Temperature",
                                   info="0 takes the likeliest token"))  # fmt: skip
    return found


def build_classes(studio: Studio, desk: Desk) -> Classes:
    """The same for the classes of a MAR."""
    tab = Classes(studio, desk)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            names = studio.model.names
            label = gr.Dropdown(names, value=names[0], label="Class", filterable=True, elem_id="mm-class")
            draw, stop = doors("Draw", ("mm-sketch", "mm-sketch-halt"))
            mode = gr.Dropdown(studio.modes, value=studio.modes[0], label="Rule and drafts", elem_id="mm-mode")
            ahead = gr.Slider(1, MAX_AHEAD, ClassWish.ahead, step=1, label="Ahead", info="tokens drafted in a round")
            prefill = gr.Slider(0, 1, ClassWish.prefill, step=0.05, label="Prefill",
                                info="share that the model draws before anything is drafted")  # fmt: skip
            inputs = [label, mode, ahead, prefill, *_sampling(studio.guidance)]
        with gr.Column(scale=5, min_width=320):
            panes = tab.lay("")
    tie(tab, [draw.click], tab.run, inputs, panes, panes, [draw, stop])
    stop.click(tab.stop, None, None, **QUICK)
    return tab
