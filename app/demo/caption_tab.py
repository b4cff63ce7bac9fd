"""The Caption tab: a picture or video and questions, answered by stock generate and by mmspec, side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component

from mmspec.app.demo import answer, guard, look, view
from mmspec.app.demo.answer import MAX_FRAMES, MAX_NEW_TOKENS, MAX_PROMPT, PICTURE, SHAPE, VIDEO, Ask, ChatTurn, Turns
from mmspec.app.demo.desk import Desk, visitor
from mmspec.app.demo.duo import Duo
from mmspec.app.demo.race import DONE
from mmspec.app.demo.tab import QUICK, Tab, buttons, connect, enable_buttons

NAMES = (  # the examples are buttons with a picture and no text
    "() => document.querySelectorAll('#mm-examples button, #mm-clips button').forEach((b, i) => "
    "b.setAttribute('aria-label', `example ${i + 1}`))"
)
HARD = " (a stress test: hard to draft)"


@dataclass(frozen=True)
class Offer:
    """The examples and prompts that the tab offers."""

    pictures: list[Path]
    prompts: list[str]
    note: str = ""
    clips: list[Path] = field(default_factory=list)
    further: str = ""  # a question for a second turn
    hard: str = ""  # the prompt that is hard to draft
    draw: Callable[[], object] | None = None  # draws a new picture of the kind that the model knows


class Caption(Tab[ChatTurn]):
    name, start = "caption", view.START

    def __init__(self, duo: Duo, desk: Desk) -> None:
        super().__init__(duo, desk)
        self.duo = duo

    def empty(self) -> str:
        ask = Ask(PICTURE, None, None, "", self.duo.name)
        return view.stage(ChatTurn(answer.ShownAnswer(), answer.ShownAnswer(), ask, 0.0))

    def look(self, both: ChatTurn) -> tuple[str, str, str]:
        return view.headline(both), view.stage(both), view.figures(both)

    def run(self, request: gr.Request, *values: object) -> Iterator[tuple[object, ...]]:
        """Run a first question; `values` are Ask's fields. Yields headline, stage, figures, talk and conversation."""
        yield from self._run(request, values, ())

    def go_on(
        self, request: gr.Request, before: list[tuple[str, str]], prompt: str, *values: object
    ) -> Iterator[tuple[object, ...]]:
        """Run a further question; `before` is the conversation so far."""
        yield from self._run(request, (*values[:3], prompt, *values[4:]), tuple((a, b) for a, b in before))

    def _run(self, request: gr.Request, values: tuple[Any, ...], before: Turns) -> Iterator[tuple[object, ...]]:
        def looks(stop: threading.Event) -> Iterator[tuple[object, ...]]:
            ask = replace(Ask(*values), before=before)
            turns = list(before)  # a stopped run must not add a turn
            for n, turn in enumerate(self.duo.run(ask, stop)):
                if turn.over and turn.plain.state == DONE:
                    turns.append((ask.prompt, turn.plain.text))
                shown = self.look(turn) if turn.over else (look.measuring(turn), gr.skip(), gr.skip())
                yield *shown, gr.skip() if n else view.talk(before, ask.prompt, turn.frames), turns

        def refuse(message: str) -> tuple[object, ...]:
            return look.refusal(message), *[gr.skip()] * 4

        return self.desk.serve(visitor(request), looks, refuse)

    def clear(self, request: gr.Request) -> tuple[object, ...]:
        """Clear media, prompts, panes and conversation."""
        self.stop(request)
        return None, None, "", "", view.START, self.empty(), look.NO_FIGURES, "", []


def build(duo: Duo, desk: Desk, offer: Offer, page: gr.Blocks) -> Caption:
    """Build the tab in the current page and connect its events."""
    caption, history = Caption(duo, desk), gr.State([])
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            question = kind, image, video, prompt = _question(offer)
            clear = gr.Button("Clear", elem_id="mm-clear", min_width=80, render=False)
            run, stop = buttons("Run", ("mm-run", "mm-stop"), clear)
            drafter = gr.Dropdown(list(duo.drafters), value=duo.name, label="Drafter", elem_id="mm-drafter")
            if len(offer.prompts) > 1:
                ready = [[text] for text in offer.prompts]
                named = [text + HARD * (text == offer.hard) for text in offer.prompts]
                gr.Examples(
                    ready, [prompt], label="Prompts", elem_id="mm-prompts", api_visibility="private",
                    example_labels=named,
                )  # fmt: skip
            inputs = [*question, drafter, *_options(duo)]
        with gr.Column(scale=5, min_width=320):
            talk = gr.HTML("", elem_id="mm-talk")
            panes = caption.build_panes(view.LEGEND)
            further, send = _further(offer)
    shown = [*panes, talk, history]
    for triggers, work, given in (
        ([run.click, prompt.submit], caption.run, inputs),
        ([send.click, further.submit], caption.go_on, [history, further, *inputs]),
    ):
        ended = connect(caption, triggers, work, given, shown, panes, [run, stop])
        ended.then(lambda turns: enable_buttons(*[bool(turns)] * 2), history, [further, send], **QUICK)
    another = [kind.change, image.change, video.change]  # a new picture or video ends the conversation
    gr.on(another, lambda: ([], "", *enable_buttons(False, False)), None, [history, talk, further, send], **QUICK)
    stop.click(caption.stop, None, None, **QUICK)
    clear.click(caption.clear, None, [image, video, prompt, further, *shown], **QUICK)
    page.load(None, js=NAMES, **QUICK)
    page.unload(caption.stop)
    return caption


def _question(offer: Offer) -> tuple[gr.Radio, gr.Image, gr.Video, gr.Textbox]:
    """The picture or video, with examples, and the prompt: the first fields of Ask."""
    kind = gr.Radio(
        [("Picture", PICTURE), ("Video", VIDEO)], value=PICTURE, show_label=False, container=False, elem_id="mm-kind"
    )
    with gr.Column(min_width=200) as still:
        first = str(offer.pictures[0]) if offer.pictures else None  # so that one click starts a run
        image = guard.picture(value=first, label="Picture", height=150, elem_id="mm-image", buttons=[])
    with gr.Column(min_width=200, visible=False) as moving:
        video = guard.video(label="Video", height=150, elem_id="mm-video", buttons=[])
    for paths, where, name in ((offer.pictures, image, "mm-examples"), (offer.clips, video, "mm-clips")):
        group = still if where is image else moving
        if paths:
            with group:
                ready = [[str(path)] for path in paths]
                gr.Examples(ready, [where], label="Examples", elem_id=name, api_visibility="private")
    if offer.draw is not None:
        with still:
            new = gr.Button("Draw a new scene", size="sm", elem_id="mm-new")
        new.click(offer.draw, None, image, **QUICK)
    if offer.note:
        gr.HTML(f'<p class="mm-small">{escape(offer.note)}</p>', elem_id="mm-note")
    kind.change(lambda k: (gr.update(visible=k == PICTURE), gr.update(visible=k == VIDEO)), kind, [still, moving],
                **QUICK)  # fmt: skip
    prompt = gr.Textbox(
        offer.prompts[0] if offer.prompts else "", label="Prompt", lines=1, max_lines=5, max_length=MAX_PROMPT,
        placeholder="What to ask about it", elem_id="mm-prompt",
    )  # fmt: skip
    return kind, image, video, prompt


def _further(offer: Offer) -> tuple[gr.Textbox, gr.Button]:
    """The box for the next question; disabled until there is a conversation."""
    with gr.Row(equal_height=True, elem_id="mm-further-row"):
        box = gr.Textbox(
            offer.further, label="Ask further", lines=1, max_lines=3, max_length=MAX_PROMPT, scale=5, interactive=False,
            placeholder="The next question of this conversation", elem_id="mm-further",
        )  # fmt: skip
        send = gr.Button("Ask", scale=1, min_width=80, interactive=False, elem_id="mm-send")
    return box, send


def _options(duo: Duo) -> list[Component]:
    """The remaining fields of Ask on the page, in order."""
    about = ("maximum draft length, in tokens", "branches; 1 is a chain", "draft nodes per call")
    enabled = duo.enabled
    with gr.Accordion("Options", open=False, elem_id="mm-options"):
        return [
            *(gr.Slider(0, most, 0, step=1, label=name.title(), info=f"{words}; 0: the drafter's default")
              for (name, most), words in zip(SHAPE.items(), about, strict=True)),
            gr.Slider(0, 2, 0, step=0.05, label="Temperature", info="0 is greedy decoding"),
            gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="for temperatures above 0"),
            gr.Number(0, label="Seed", precision=0, minimum=0),
            gr.Checkbox(True, label="Same draws", info="above temperature 0: the tokens that stock generate draws"),
            gr.Slider(1, MAX_NEW_TOKENS, 128, step=1, label="New tokens", info="maximum"),
            gr.Slider(1, MAX_FRAMES, 8, step=1, label="Frames", info="of a video, evenly spaced"),
            gr.Checkbox(bool(enabled.get("compile")), label="Compile", info="the first run takes up to a minute more"),
            gr.Checkbox(enabled.get("auto", False), label="Auto", info="no drafts while they cost more than they save"),
        ]  # fmt: skip
