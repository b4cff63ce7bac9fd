"""The Caption tab: a picture and a question, stock generate and mmspec side by side, and what its buttons do."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app import demo_view as view
from mmspec.app.demo_answer import (
    MAX_DEPTH,
    MAX_NEW_TOKENS,
    MAX_PROMPT,
    MAX_SIZE,
    MAX_WIDTH,
    Answer,
    Ask,
    RefusedError,
    Turn,
)
from mmspec.app.demo_guard import picture
from mmspec.app.demo_run import Duo
from mmspec.app.engine import first_line

# A phone shows the answers below the question: go there when a run starts.
SHOW = "() => { if (innerWidth < 640) document.getElementById('mm-summary').scrollIntoView({behavior: 'smooth'}) }"
NAMES = (  # the examples are buttons with a picture and no words
    "() => document.querySelectorAll('#mm-examples button').forEach((b, i) => "
    "b.setAttribute('aria-label', `example picture ${i + 1}`))"
)
MODEL = "model"  # the concurrency id of whatever runs the model: one at a time
PLAIN = ("Plain", "stock generate: one call of the model for each token")


@dataclass(frozen=True)
class Offer:
    """What the tab has ready to be chosen."""

    pictures: list[Path]
    prompts: list[str]
    note: str = ""


class Caption:
    """The tab's events; what must be stopped is kept by browser session."""

    def __init__(self, duo: Duo) -> None:
        self.duo = duo
        self._stops: dict[str, threading.Event] = {}

    def begin(self, request: gr.Request) -> tuple[Any, ...]:
        """Before the queue: end an earlier run of this session and clear the panes."""
        self.stop(request)
        self._stops[str(request.session_hash)] = threading.Event()
        return view.waiting(), *_panes(Answer(False), Answer(True), self.duo.name), *_buttons(running=True)

    def run(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Summary and both panes, again and again while the run goes on; `values` are Ask's fields, in order."""
        session = str(request.session_hash)
        stop = self._stops.setdefault(session, threading.Event())
        try:
            ask = Ask(*values)
            states = ("", "")
            for turn in self.duo.run(ask, stop):
                panes, states = self._changed(turn, ask.drafter, states)
                yield view.summary(turn), *panes
        except RefusedError as error:
            yield view.refusal(str(error)), gr.skip(), gr.skip()
        except Exception as error:  # whatever the model raised: the page says so and goes on
            traceback.print_exc(file=sys.stderr)
            yield view.refusal(f"The model failed: {first_line(error)}"), gr.skip(), gr.skip()
        finally:
            if self._stops.get(session) is stop:
                del self._stops[session]

    def stop(self, request: gr.Request) -> None:
        """Ends this session's run, whether it writes or waits; also called when the page is closed."""
        running = self._stops.get(str(request.session_hash))
        if running is not None:
            running.set()

    def clear(self, request: gr.Request) -> tuple[Any, ...]:
        self.stop(request)
        return None, "", view.START, *_panes(Answer(False), Answer(True), self.duo.name)

    @staticmethod
    def _changed(turn: Turn, drafter: str, before: tuple[str, str]) -> tuple[tuple[Any, Any], tuple[str, str]]:
        """The panes' HTML, left out where it is what it was."""
        now = _panes(turn.plain, turn.fast, drafter)
        return tuple(new if new != old else gr.skip() for new, old in zip(now, before, strict=True)), now  # type: ignore


def _panes(plain: Answer, fast: Answer, drafter: str) -> tuple[str, str]:
    about = f"{drafter} drafts ahead; one call checks the whole draft"
    return view.pane(plain, *PLAIN), view.pane(fast, "mmspec", about)


def _buttons(running: bool) -> tuple[Any, Any]:
    return gr.update(interactive=not running), gr.update(interactive=running)


def build(duo: Duo, offer: Offer, page: gr.Blocks) -> Caption:
    """Lay the tab out in the page under construction and tie its events."""
    caption = Caption(duo)
    with gr.Row(elem_id="mm-caption"):
        with gr.Column(scale=2, min_width=300):
            inputs = _question(offer)
            with gr.Row(elem_id="mm-buttons"):
                run = gr.Button("Run", variant="primary", elem_id="mm-run", min_width=80)
                stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-stop", min_width=80)
                clear = gr.Button("Clear", elem_id="mm-clear", min_width=80)
            if len(offer.prompts) > 1:
                ready = [[prompt] for prompt in offer.prompts]
                gr.Examples(ready, inputs[1:], label="Prompts", elem_id="mm-prompts", api_visibility="private")
            inputs += _options(duo)
        with gr.Column(scale=5, min_width=320):
            summary = gr.HTML(view.START, elem_id="mm-summary")
            gr.HTML(view.LEGEND)
            with gr.Row(equal_height=True):
                first, second = _panes(Answer(False), Answer(True), duo.name)
                plain = gr.HTML(first, elem_id="mm-plain-pane", min_width=300)
                fast = gr.HTML(second, elem_id="mm-fast-pane", min_width=300)
            if offer.note:
                gr.HTML(f'<p class="mm-small">{escape(offer.note)}</p>')
    shown = [summary, plain, fast]

    quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    started = gr.on([run.click, inputs[1].submit], caption.begin, None, [*shown, run, stop], **quick)
    ended = started.then(
        caption.run,
        inputs,
        shown,
        concurrency_id=MODEL,
        concurrency_limit=1,
        show_progress="hidden",
        api_visibility="private",
    )
    ended.then(lambda: _buttons(running=False), None, [run, stop], **quick)
    gr.on([run.click, inputs[1].submit], None, js=SHOW, **quick)
    stop.click(caption.stop, None, None, **quick)
    clear.click(caption.clear, None, [inputs[0], inputs[1], *shown], **quick)
    page.load(None, js=NAMES, **quick)
    page.unload(caption.stop)
    return caption


def _question(offer: Offer) -> list[Any]:
    """Picture, with examples, and prompt."""
    image = picture(label="Picture", height=200, elem_id="mm-image", buttons=[])
    if offer.pictures:
        ready = [[str(path)] for path in offer.pictures]
        gr.Examples(ready, [image], label="Examples", elem_id="mm-examples", api_visibility="private")
    prompt = gr.Textbox(
        offer.prompts[0] if offer.prompts else "", label="Prompt", lines=1, max_lines=5, max_length=MAX_PROMPT,
        placeholder="What to ask about the picture", elem_id="mm-prompt",
    )  # fmt: skip
    return [image, prompt]


def _options(duo: Duo) -> list[Any]:
    """The other fields of Ask, in its order."""
    depth, width, size = duo.tree
    names = list(duo.drafters)
    with gr.Accordion("Options", open=False, elem_id="mm-options"):
        drafter = gr.Dropdown(names, value=duo.name, label="Drafter", interactive=True)
        branches = duo.name != "ngram"
        sliders = [
            gr.Slider(1, MAX_DEPTH, depth, step=1, label="Depth", info="longest draft, in tokens"),
            gr.Slider(1, MAX_WIDTH, width, step=1, label="Width", info="branches; 1 is a chain", interactive=branches),
            gr.Slider(2, MAX_SIZE, size, step=1, label="Size", info="nodes checked in a call", interactive=branches),
            gr.Slider(0, 2, 0, step=0.05, label="Temperature", info="0 takes the likeliest token"),
            gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="counts above temperature 0"),
            gr.Slider(1, MAX_NEW_TOKENS, 128, step=1, label="New tokens", info="at most"),
        ]

        def chosen(name: str) -> list[Any]:
            branches = name != "ngram"  # prompt lookup proposes one chain
            return [gr.update(interactive=branches)] * 2

        drafter.change(chosen, drafter, sliders[1:3], queue=False, show_progress="hidden", api_visibility="private")
    return [drafter, *sliders]
