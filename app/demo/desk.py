"""The queue of all tabs for the models: one run at a time, which its visitor, a time limit or an error ends."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mmspec.app.compare import free
from mmspec.app.devices import first_line

if TYPE_CHECKING:
    import gradio as gr
    from _typeshed import DataclassInstance

T = TypeVar("T")
QUEUE = "models"  # the concurrency id of all events that run a model
MAX_SEED = 2**31 - 1
BUSY = 5.0  # seconds to wait for a run that is being stopped


class RefusedError(ValueError):
    """A request is refused; the message is for the visitor."""


def within(wish: DataclassInstance, limits: dict[str, tuple[float, float]]) -> None:
    """Raise RefusedError for a field of `wish` that is not a number in its range, or not an integer if it should be."""
    whole = {field.name for field in dataclasses.fields(wish) if field.type == "int"}
    for name, (low, high) in limits.items():
        value = getattr(wish, name)
        if not isinstance(value, int if name in whole else (int, float)) or not low <= value <= high:
            must = "be a whole number" if name in whole else "lie"
            raise RefusedError(f"{name} is {value}; it must {must} between {low} and {high}.")


class Desk:
    """Runs by browser session. A visitor has one run: a new one, in any tab, ends the previous one."""

    def __init__(self) -> None:
        self._ends: dict[str, threading.Event] = {}
        self._lock = threading.Lock()  # gradio's queue admits one run at a time, but can be bypassed

    def begin(self, visitor: str) -> None:
        """Called before the queue: end an earlier run of this visitor, so that its place becomes free."""
        self.stop(visitor)
        self._ends[visitor] = threading.Event()

    def stop(self, visitor: str) -> None:
        """End this visitor's run, whether it is running or waiting; also called when the page is closed."""
        running = self._ends.get(visitor)
        if running is not None:
            running.set()

    def serve(
        self, visitor: str, run: Callable[[threading.Event], Iterator[T]], refuse: Callable[[str], T]
    ) -> Iterator[T]:
        """Yield the views of a run; if it fails or is refused, the reason."""
        end = self._ends.setdefault(visitor, threading.Event())
        mine = self._lock.acquire(timeout=BUSY)
        try:
            if not mine:
                raise RefusedError("The model is still busy with another run. Try again in a moment.")
            with contextlib.closing(run(end)) as looks:  # type: ignore[type-var]
                yield from looks
        except RefusedError as error:
            yield refuse(str(error))
        except Exception as error:  # any error of the model is shown on the page
            traceback.print_exc(file=sys.stderr)
            yield refuse(f"The model failed: {first_line(error)}")
        finally:
            if mine:
                free()
                self._lock.release()
            if self._ends.get(visitor) is end:
                del self._ends[visitor]


def visitor(request: gr.Request) -> str:
    return str(request.session_hash)
