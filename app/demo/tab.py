"""What the tabs with a run have in common: how it begins and ends, and how their events are queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from mmspec.app.demo import look
from mmspec.app.demo.desk import QUEUE, Desk, visitor

# A phone shows the answers below the question: go there when a run starts.
SHOW = "() => {{ if (innerWidth < 640) document.getElementById('{}').scrollIntoView({{behavior: 'smooth'}}) }}"
QUIET = {"show_progress": "hidden", "api_visibility": "private"}
QUICK: dict[str, Any] = {"queue": False, **QUIET}
IN_TURN: dict[str, Any] = {"concurrency_id": QUEUE, "concurrency_limit": 1, **QUIET}


class Tab:
    """Events of a tab that shows a summary and two panes."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def empty(self) -> tuple[str, str]:
        """Both panes before a run."""
        raise NotImplementedError

    def begin(self, request: gr.Request) -> tuple[Any, ...]:
        """Before the queue: end an earlier run of this visitor and clear the panes."""
        self.desk.begin(visitor(request))
        return look.waiting(), *self.empty(), *buttons(running=True)

    def serve(
        self, request: gr.Request, looks: Callable[[threading.Event], Iterator[tuple[Any, ...]]]
    ) -> Iterator[tuple[Any, ...]]:
        """What `looks` gives once it is this visitor's turn; a refusal stands in the summary's place."""
        return self.desk.serve(visitor(request), looks, lambda message: (look.refusal(message), gr.skip(), gr.skip()))

    def stop(self, request: gr.Request) -> None:
        self.desk.stop(visitor(request))


def buttons(running: bool) -> tuple[Any, Any]:
    """Of those that start and stop a run, which can be pressed."""
    return gr.update(interactive=not running), gr.update(interactive=running)
