"""What the tabs with a run have in common: how it begins and ends, and how their events are queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from mmspec.app.demo import look
from mmspec.app.demo.desk import QUEUE, Desk, visitor
from mmspec.app.demo.race import Race

# A phone shows the answers below the question: go there when a run starts.
SHOW = "() => {{ if (innerWidth < 640) document.getElementById('{}').scrollIntoView({{behavior: 'smooth'}}) }}"
QUIET = {"show_progress": "hidden", "api_visibility": "private"}
QUICK: dict[str, Any] = {"queue": False, **QUIET}
IN_TURN: dict[str, Any] = {"concurrency_id": QUEUE, "concurrency_limit": 1, **QUIET}


class Tab:
    """Events of a tab that shows a summary and two panes of a race."""

    wish: Callable[..., Any]  # what is asked, from the fields of the page in their order

    def __init__(self, race: Race, desk: Desk) -> None:
        self.race, self.desk = race, desk

    def empty(self) -> tuple[str, str]:
        """Both panes before a run."""
        raise NotImplementedError

    def look(self, both: Any) -> tuple[str, str, str]:
        """Summary and both panes at one moment of a run."""
        raise NotImplementedError

    def run(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Summary and both panes, again and again; what is as it was is left alone."""

        def looks(stop: threading.Event) -> Iterator[tuple[Any, ...]]:
            shown = ("", "", "")
            for both in self.race.run(self.wish(*values), stop):
                now = self.look(both)
                yield tuple(new if new != old else gr.skip() for new, old in zip(now, shown, strict=True))
                shown = now

        def refuse(message: str) -> tuple[Any, ...]:
            return look.refusal(message), gr.skip(), gr.skip()

        yield from self.desk.serve(visitor(request), looks, refuse)  # gradio knows a generator by its function

    def begin(self, request: gr.Request) -> tuple[Any, ...]:
        """Before the queue: end an earlier run of this visitor and clear the panes."""
        self.desk.begin(visitor(request))
        return look.waiting(), *self.empty(), *buttons(running=True)

    def stop(self, request: gr.Request) -> None:
        self.desk.stop(visitor(request))


def tie(
    tab: Tab, triggers: Sequence[Any], work: Callable[..., Any], given: Sequence[Any], shown: Sequence[Any],
    panes: Sequence[Any], doors: Sequence[Any],
) -> Any:  # fmt: skip
    """Tie a run to what starts it; the event of its end.

    Args:
        given, shown: what `work` takes and gives.
        panes: the summary and both panes, which `begin` clears.
        doors: the buttons that start and stop a run.
    """
    started = gr.on(triggers, tab.begin, None, [*panes, *doors], **QUICK)
    ended = started.then(work, given, shown, **IN_TURN)
    ended.failure(lambda: look.refusal(look.FAILED), None, panes[0], **QUICK)
    gr.on(triggers, None, js=SHOW.format(panes[0].elem_id), **QUICK)
    return ended.then(lambda: buttons(running=False), None, doors, **QUICK)


def buttons(running: bool) -> tuple[Any, Any]:
    """Of those that start and stop a run, which can be pressed."""
    return gr.update(interactive=not running), gr.update(interactive=running)
