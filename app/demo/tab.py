"""What the tabs with a race share: how a run begins and ends, what it shows, and how its events are queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from mmspec.app.demo import look
from mmspec.app.demo.desk import QUEUE, Desk, visitor
from mmspec.app.demo.race import Race, V

# On a phone the answers are below the question: scroll there when a run starts.
SHOW = "() => {{ if (innerWidth < 640) document.getElementById('{}').scrollIntoView({{behavior: 'smooth'}}) }}"
REPLAY = (  # from the beginning, at this rate of the measured speed
    "() => document.getElementById('{}').getAnimations({{subtree: true}}).forEach(a => {{ a.playbackRate = {}; "
    "a.currentTime = 0; a.play() }})"
)
RATES = {"Replay": 1, "Replay slowly": 0.25}
QUIET = {"show_progress": "hidden", "api_visibility": "private"}
QUICK: dict[str, Any] = {"queue": False, **QUIET}
IN_TURN: dict[str, Any] = {"concurrency_id": QUEUE, "concurrency_limit": 1, **QUIET}


class Tab(Generic[V]):
    """The events of a tab that replays a race."""

    name: str  # part of its elements' ids
    start: str  # shown in place of the headline before a run
    wish: Callable[..., object]  # builds the request from the fields of the page, in order

    def __init__(self, race: Race[Any, V, Any], desk: Desk) -> None:
        self.race, self.desk = race, desk

    def empty(self) -> str:
        raise NotImplementedError

    def look(self, both: V) -> tuple[str, str, str]:
        """Headline, stage and figures of a run that has ended."""
        raise NotImplementedError

    def run(self, request: gr.Request, *values: object) -> Iterator[tuple[object, ...]]:
        """Yield headline, stage and figures; only the headline changes until the run has ended."""

        def looks(stop: threading.Event) -> Iterator[tuple[object, ...]]:
            for both in self.race.run(self.wish(*values), stop):
                yield self.look(both) if both.over else (look.measuring(both), gr.skip(), gr.skip())

        def refuse(message: str) -> tuple[object, ...]:
            return look.refusal(message), gr.skip(), gr.skip()

        yield from self.desk.serve(visitor(request), looks, refuse)  # gradio detects generators by their function

    def begin(self, request: gr.Request) -> tuple[object, ...]:
        """Called before the queue: end an earlier run of this visitor and clear its output."""
        self.desk.begin(visitor(request))
        return look.WAITING, self.empty(), look.NO_FIGURES, *enable_buttons(False, True)

    def stop(self, request: gr.Request) -> None:
        self.desk.stop(visitor(request))

    def build_panes(self, legend: str, *more: Component) -> list[Component]:
        """Build headline, stage, replay buttons and figures in the current page."""
        summary = gr.HTML(self.start, elem_id=f"mm-{self.name}-summary")
        stage = gr.HTML(self.empty(), elem_id=f"mm-{self.name}-race")
        with gr.Row(elem_classes="mm-replay"):
            gr.HTML(legend)
            for one in more:
                one.render()
            for label, rate in RATES.items():
                gr.Button(label, size="sm", scale=0).click(None, js=REPLAY.format(stage.elem_id, rate), **QUICK)
        with gr.Accordion("Figures", open=False, elem_id=f"mm-{self.name}-figures"):
            figures = gr.Markdown(look.NO_FIGURES)
        return [summary, stage, figures]


def connect(
    tab: Tab[Any], triggers: Sequence[Callable[..., Dependency]], work: Callable[..., Iterator[object]],
    given: Sequence[Component], shown: Sequence[Component],
    panes: Sequence[Component], buttons: Sequence[Component],
) -> Dependency:  # fmt: skip
    """Connect a run to the events that start it; returns the event of its end.

    Args:
        given, shown: inputs and outputs of `work`.
        panes: headline, stage and figures, which `begin` clears.
        buttons: the buttons that start and stop a run.
    """
    started = gr.on(triggers, tab.begin, None, [*panes, *buttons], **QUICK)
    ended = started.then(work, given, shown, **IN_TURN)
    ended.failure(lambda: look.refusal(look.FAILED), None, panes[0], **QUICK)
    gr.on(triggers, None, js=SHOW.format(panes[0].elem_id), **QUICK)
    return ended.then(lambda: enable_buttons(True, False), None, buttons, **QUICK)


def enable_buttons(*may: bool) -> tuple[dict[str, object], ...]:
    """Updates that enable or disable buttons."""
    return tuple(gr.update(interactive=one) for one in may)


def buttons(start: str, ids: Sequence[str], *more: Component) -> list[gr.Button]:
    """A row with the buttons that start and stop a run, and others."""
    with gr.Row():
        run = gr.Button(start, variant="primary", elem_id=ids[0], min_width=80)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id=ids[1], min_width=80)
        for button in more:
            button.render()
    return [run, stop]
