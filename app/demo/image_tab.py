"""The Image tab: a prompt drawn by plain decoding and with drafts, its token grid filling in, and the lossy knob."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from mmspec.app.demo import image_view
from mmspec.app.demo.answer import MAX_PROMPT
from mmspec.app.demo.canvas import Canvas, Easel, Pair
from mmspec.app.demo.desk import Desk
from mmspec.app.demo.tab import QUICK, Tab, tie
from mmspec.app.demo.wish import (
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

PLAIN = ("Plain", "the pipeline as it is: one forward of the model for each token")
VIEWS = ["picture", "with drafts", "drafts only"]
TURN = "(view) => { document.getElementById('mm-paint').dataset.view = view; }"


class Image(Tab):
    """The tab's events."""

    wish = PromptWish

    def __init__(self, easel: Easel, desk: Desk, own: bool) -> None:
        super().__init__(easel, desk)
        self.grid = easel.grid
        self.own = own  # whether it is the embedded model, which knows few words

    def empty(self) -> tuple[str, str]:
        return self._panes(Canvas(False, self.grid), Canvas(True, self.grid), SEED_EXACT)

    def look(self, both: Pair) -> tuple[str, str, str]:
        summary = image_view.summary(both, self._unknown(both.wish.prompt))
        return summary, *self._panes(both.plain, both.fast, both.wish.method)

    @staticmethod
    def _panes(plain: Canvas, fast: Canvas, method: str) -> tuple[str, str]:
        about = f"{method}: one forward looks at many tokens"
        return image_view.pane(plain, *PLAIN), image_view.pane(fast, "mmspec", about)

    def _unknown(self, prompt: str) -> str:
        words = unknown_words([prompt]) if self.own else []
        return f"This model does not know: {escape(', '.join(words))}." if words else ""


def build(easel: Easel, desk: Desk, prompts: Sequence[str], own: bool, page: gr.Blocks) -> Image:
    """Lay the tab out in the page under construction and tie its events."""
    image = Image(easel, desk, own)
    with gr.Row(elem_id="mm-paint"):
        with gr.Column(scale=2, min_width=300):
            prompt = gr.Textbox(
                prompts[0] if prompts else "", label="Prompt", lines=2, max_lines=5, max_length=MAX_PROMPT,
                placeholder="What to draw", elem_id="mm-wish",
            )  # fmt: skip
            if easel.painter.classes:
                prompt.label = f"Class, 0 to {easel.painter.classes - 1}"
            with gr.Row(elem_id="mm-paint-buttons"):
                draw = gr.Button("Draw", variant="primary", elem_id="mm-draw", min_width=80)
                stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-halt", min_width=80)
            if len(prompts) > 1:
                ready = [[text] for text in prompts]
                gr.Examples(ready, [prompt], label="Prompts", elem_id="mm-wishes", api_visibility="private")
            inputs = [prompt, *_method(easel), *_sampling(easel)]
        with gr.Column(scale=5, min_width=320):
            summary = gr.HTML(image_view.START, elem_id="mm-paint-summary")
            with gr.Row(elem_id="mm-views"):
                view = gr.Radio(VIEWS, value=VIEWS[1], show_label=False, container=False, elem_id="mm-view")
                gr.HTML(image_view.LEGEND)
            with gr.Row(equal_height=True):
                first, second = image.empty()
                plain = gr.HTML(first, elem_id="mm-plain-canvas", min_width=300)
                fast = gr.HTML(second, elem_id="mm-fast-canvas", min_width=300)

    panes = [summary, plain, fast]
    tie(image, [draw.click, prompt.submit], image.run, inputs, panes, panes, [draw, stop])
    stop.click(image.stop, None, None, **QUICK)
    view.change(None, view, js=TURN, **QUICK)
    return image


def _method(easel: Easel) -> list[Any]:
    """How to draft, and the knob that bends the distribution: method, window, rule, boldness, budget."""
    method = gr.Dropdown(list(easel.methods), value=SEED_EXACT, label="Method", elem_id="mm-method")
    window = gr.Slider(2, MAX_WINDOW, 16, step=1, label="Window", info="tokens that one forward looks at")
    with gr.Accordion("Relaxation (lossy)", open=False, elem_id="mm-lossy"):
        gr.HTML('<p class="mm-small">A relaxed rule keeps more drafted tokens, which changes the distribution. What it '
                "is charged bounds how far, and is shown with the picture.</p>")  # fmt: skip
        rule = gr.Dropdown([LOSSLESS, *FAMILIES], value=LOSSLESS, label="Lossy rule", interactive=False)
        boldness = gr.Slider(1, STEPS, 2, step=1, label="Boldness", info="lossy: from mild to bold", interactive=False)
        budget = gr.Number(0, label="Budget", minimum=0, info="most total variation to spend; 0: no limit")

    def chosen(name: str) -> tuple[Any, ...]:
        bound = seed_exact(name)
        relaxed = gr.update(interactive=False, value=LOSSLESS) if bound else gr.update(interactive=True)
        return gr.update(interactive=name.startswith("jacobi")), relaxed

    method.change(chosen, method, [window, rule], **QUICK)
    rule.change(lambda name: gr.update(interactive=name != LOSSLESS), rule, boldness, **QUICK)
    return [method, window, rule, boldness, budget]


def _sampling(easel: Easel) -> list[Any]:
    with gr.Accordion("Sampling", open=False, elem_id="mm-paint-options"):
        return [
            gr.Number(0, label="Seed", precision=0, minimum=0, info="of both pictures"),
            gr.Slider(1, MAX_GUIDANCE, easel.guidance, step=0.5, label="Guidance",
                      info="how closely to follow the prompt"),
            gr.Slider(0, 2, easel.temperature, step=0.05, label="Temperature",
                      info="0 takes the likeliest token"),
        ]  # fmt: skip
