"""The Caption tab: a picture or video and questions, stock generate and mmspec one after the other, side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app.demo import guard, look, view
from mmspec.app.demo.answer import (
    DONE,
    MAX_DEPTH,
    MAX_FRAMES,
    MAX_NEW_TOKENS,
    MAX_PROMPT,
    MAX_SIZE,
    MAX_WIDTH,
    PICTURE,
    VIDEO,
    Ask,
    ShownAnswer,
    Turns,
)
from mmspec.app.demo.desk import Desk, visitor
from mmspec.app.demo.duo import Duo
from mmspec.app.demo.tab import QUICK, Tab, tie

NAMES = (  # the examples are buttons with a picture and no words
    "() => document.querySelectorAll('#mm-examples button, #mm-clips button').forEach((b, i) => "
    "b.setAttribute('aria-label', `example ${i + 1}`))"
)
HARD = " (a stress test: hard to draft)"
PLAIN = ("Plain", "stock generate: one call of the model for each token")


@dataclass(frozen=True)
class Offer:
    """What the tab has ready to be chosen."""

    pictures: list[Path]
    prompts: list[str]
    note: str = ""
    clips: list[Path] = field(default_factory=list)
    further: str = ""  # a question for a second turn
    hard: str = ""  # the one of the prompts that is hard to draft
    draw: Callable[[], Any] | None = None  # a new picture of those that the model knows


class Caption(Tab):
    """The tab's events."""

    def __init__(self, duo: Duo, desk: Desk) -> None:
        super().__init__(duo, desk)
        self.duo = duo

    def empty(self) -> tuple[str, str]:
        return _panes(ShownAnswer(False), ShownAnswer(True), self.duo.name)

    def run(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        """A first question; `values` are Ask's fields, in order. Gives talk, summary, both panes, the conversation."""
        yield from self._run(request, values, ())

    def go_on(self, request: gr.Request, before: list[Any], prompt: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """A further question; `before` is the conversation so far."""
        yield from self._run(request, (*values[:3], prompt, *values[4:]), tuple((a, b) for a, b in before))

    def _run(self, request: gr.Request, values: tuple[Any, ...], before: Turns) -> Iterator[tuple[Any, ...]]:
        nothing = (gr.skip(),) * 5

        def looks(stop: threading.Event) -> Iterator[tuple[Any, ...]]:
            ask, shown, talk = replace(Ask(*values), before=before), ("",) * 4, None
            for turn in self.duo.run(ask, stop):
                talk = view.talk(before, ask.prompt, turn.frames) if talk is None else talk
                now = (talk, view.summary(turn), *_panes(turn.plain, turn.fast, ask.drafter))
                said = gr.skip() if shown[1] else list(before)  # a run that is stopped leaves no turn of another one
                if turn.over and turn.plain.state == DONE:
                    said = [*before, (ask.prompt, turn.plain.text)]
                yield *(new if new != old else gr.skip() for new, old in zip(now, shown, strict=True)), said
                shown = now

        def refuse(message: str) -> tuple[Any, ...]:
            return gr.skip(), look.refusal(message), *nothing[2:]

        return self.desk.serve(visitor(request), looks, refuse)

    def clear(self, request: gr.Request) -> tuple[Any, ...]:
        """No media, no prompts, empty panes, no conversation."""
        self.stop(request)
        return None, None, "", "", "", view.START, *self.empty(), []


def _panes(plain: ShownAnswer, fast: ShownAnswer, drafter: str) -> tuple[str, str]:
    about = f"{drafter} drafts ahead; one call checks the whole draft"
    return view.pane(plain, *PLAIN), view.pane(fast, "mmspec", about)


def build(duo: Duo, desk: Desk, offer: Offer, page: gr.Blocks) -> Caption:
    """Lay the tab out in the page under construction and tie its events."""
    caption, said = Caption(duo, desk), gr.State([])
    with gr.Row(elem_id="mm-caption"):
        with gr.Column(scale=2, min_width=300):
            inputs = _question(offer)
            with gr.Row(elem_id="mm-buttons"):
                run = gr.Button("Run", variant="primary", elem_id="mm-run", min_width=80)
                stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-stop", min_width=80)
                clear = gr.Button("Clear", elem_id="mm-clear", min_width=80)
            if len(offer.prompts) > 1:
                ready = [[prompt] for prompt in offer.prompts]
                named = [prompt + HARD * (prompt == offer.hard) for prompt in offer.prompts]
                gr.Examples(
                    ready, inputs[3:4], label="Prompts", elem_id="mm-prompts", api_visibility="private",
                    example_labels=named,
                )  # fmt: skip
            inputs += _options(duo)
        with gr.Column(scale=5, min_width=320):
            summary = gr.HTML(view.START, elem_id="mm-summary")
            talk = gr.HTML("", elem_id="mm-talk")
            gr.HTML(view.LEGEND)
            with gr.Row(equal_height=True):
                first, second = caption.empty()
                plain = gr.HTML(first, elem_id="mm-plain-pane", min_width=300)
                fast = gr.HTML(second, elem_id="mm-fast-pane", min_width=300)
            further, send = _further(offer)
    panes, shown = [summary, plain, fast], [talk, summary, plain, fast, said]
    for triggers, work, given in (
        ([run.click, inputs[3].submit], caption.run, inputs),
        ([send.click, further.submit], caption.go_on, [said, further, *inputs]),
    ):
        ended = tie(caption, triggers, work, given, shown, panes, [run, stop])
        ended.then(lambda turns: _may_ask(bool(turns)), said, [further, send], **QUICK)
    another = [c.change for c in inputs[:3]]  # thing to talk about
    gr.on(another, lambda: ([], "", *_may_ask(False)), None, [said, talk, further, send], **QUICK)
    stop.click(caption.stop, None, None, **QUICK)
    clear.click(caption.clear, None, [*inputs[1:4], further, *shown], **QUICK)
    page.load(None, js=NAMES, **QUICK)
    page.unload(caption.stop)
    return caption


def _question(offer: Offer) -> list[Any]:
    """What to look at, with examples, and the prompt: the first fields of Ask."""
    kind = gr.Radio(
        [("Picture", PICTURE), ("Video", VIDEO)], value=PICTURE, show_label=False, container=False, elem_id="mm-kind"
    )
    with gr.Column(min_width=200) as still:
        first = str(offer.pictures[0]) if offer.pictures else None  # one click shows the effect
        image = guard.picture(value=first, label="Picture", height=200, elem_id="mm-image", buttons=[])
    with gr.Column(min_width=200, visible=False) as moving:
        video = guard.video(label="Video", height=200, elem_id="mm-video", buttons=[])
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
    return [kind, image, video, prompt]


def _further(offer: Offer) -> tuple[gr.Textbox, gr.Button]:
    """Where a conversation goes on; shut until there is one."""
    with gr.Row(equal_height=True, elem_id="mm-further-row"):
        box = gr.Textbox(
            offer.further, label="Ask further", lines=1, max_lines=3, max_length=MAX_PROMPT, scale=5, interactive=False,
            placeholder="The next question of this conversation", elem_id="mm-further",
        )  # fmt: skip
        send = gr.Button("Ask", scale=1, min_width=80, interactive=False, elem_id="mm-send")
    return box, send


def _may_ask(yes: bool) -> tuple[Any, Any]:
    return gr.update(interactive=yes), gr.update(interactive=yes)


def _options(duo: Duo) -> list[Any]:
    """The other fields of Ask that are on the page, in its order."""
    depth, width, size = duo.tree
    with gr.Accordion("Options", open=False, elem_id="mm-options"):
        drafter = gr.Dropdown(list(duo.drafters), value=duo.name, label="Drafter", interactive=True)
        branches = duo.name != "ngram"
        tree = [
            gr.Slider(1, MAX_DEPTH, depth, step=1, label="Depth", info="longest draft, in tokens"),
            gr.Slider(1, MAX_WIDTH, width, step=1, label="Width", info="branches; 1 is a chain", interactive=branches),
            gr.Slider(2, MAX_SIZE, size, step=1, label="Size", info="nodes checked in a call", interactive=branches),
        ]
        sampling = [
            gr.Slider(0, 2, 0, step=0.05, label="Temperature", info="0 takes the likeliest token"),
            gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="counts above temperature 0"),
            gr.Number(0, label="Seed", precision=0, minimum=0),
            gr.Checkbox(True, label="Same draws", info="above temperature 0: the tokens that stock generate draws"),
        ]
        limits = [
            gr.Slider(1, MAX_NEW_TOKENS, 128, step=1, label="New tokens", info="at most"),
            gr.Slider(1, MAX_FRAMES, 8, step=1, label="Frames", info="of a video, evenly spread"),
        ]
        said = duo.enabled
        speed = [
            gr.Checkbox(bool(said.get("compile")), label="Compile", info="the first run takes up to a minute longer"),
            gr.Checkbox(said.get("auto", False), label="Auto", info="no drafts while they do not pay"),
        ]

        def chosen(name: str) -> list[Any]:
            return [gr.update(interactive=name != "ngram")] * 2  # prompt lookup proposes one chain

        drafter.change(chosen, drafter, tree[1:], **QUICK)
    return [drafter, *tree, *sampling, *limits, *speed]
