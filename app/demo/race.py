"""A race: one model answers a request plainly and then accelerated, and the page replays both sides on one clock.

The sides are measured one after the other, while the page shows only a count. Every animated part has its time as
`--t`; the style sheet shows it then.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from html import escape
from typing import Any, ClassVar

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency
from pydantic import BaseModel, ValidationError

from mmspec.app.compare import free
from mmspec.app.devices import EngineError, first_line

TIME_LIMIT = 120.0  # seconds for both sides together
REFRESH = 0.25  # seconds between two counts
WAITING, RUNNING, DONE, TIMED_OUT = "", "running", "done", "time limit reached"
MODELS = ThreadPoolExecutor(1, "mmspec-demo")  # all models run in its one thread, so there is one race at a time
LONGEST = 12.0  # maximum seconds of a replay; longer runs are replayed faster, both sides alike
QUEUE = "models"  # the concurrency id of all events that run a model
QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
# On a phone the answers are below the question: scroll there when a run starts.
SHOW = "() => {{ if (innerWidth < 640) document.getElementById('{}').scrollIntoView({{behavior: 'smooth'}}) }}"
REPLAY = (  # from the beginning, at this rate of the measured speed
    "() => document.getElementById('{}').getAnimations({{subtree: true}}).forEach(a => {{ a.playbackRate = {}; "
    "a.currentTime = 0; a.play() }})"
)
TITLES = "Plain", "mmspec"
Shown = tuple[str, Any]  # the headline and the stage; gr.skip() leaves one as it is


class RefusedError(EngineError):
    """A request is refused; the message is for the visitor."""


@dataclass
class RaceSide:
    """One side of a race; times are in seconds since it began.

    Attributes:
        at: when each token was generated; 0: not yet.
        calls: number of tokens from each forward of the model, beginning with the prefill's.
    """

    state: str = WAITING
    seconds: float = 0.0
    at: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.calls)

    @property
    def forwards(self) -> int:
        return len(self.calls)

    @property
    def first(self) -> float:
        """Time to the first token."""
        return min(filter(None, self.at), default=0.0)


@dataclass
class RaceView:
    """Both sides of a race; subclasses have the request as well. `over` is set once nothing changes any more."""

    plain: Any  # RaceSides
    fast: Any
    over: bool = field(default=False, kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether both sides have finished."""
        return bool(self.plain.state == self.fast.state == DONE)


@dataclass(frozen=True)
class Limits:
    stop: threading.Event
    deadline: float  # of time.monotonic

    @property
    def over(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.deadline


class Race:
    """Runs both sides on one loaded model. Subclasses implement `measure`."""

    time_limit = TIME_LIMIT
    stop: ClassVar[threading.Event] = threading.Event()  # ends the race that is running

    def measure(self, view: Any, limits: Limits) -> None:
        """Fill in both sides, until they end or the limits end them. RefusedError if the request is refused."""
        raise NotImplementedError

    def run(self, view: RaceView) -> Generator[Any, None, None]:
        """Yield the view while it is filled in; the last time it is final. Closing the iterator ends the race.

        Raises RefusedError or EngineError: the request is refused, or the model cannot be used.
        """
        stop = threading.Event()
        job = MODELS.submit(self._measured, view, stop)
        try:
            while not job.done():
                yield view
                wait([job], REFRESH)
        finally:
            job.cancel()
            stop.set()
        job.result()
        view.over = True
        yield view

    def _measured(self, view: RaceView, stop: threading.Event) -> None:
        Race.stop = stop
        try:
            self.measure(view, Limits(stop, time.monotonic() + self.time_limit))
        finally:
            free()


def close() -> None:
    """End all races, so that the process can end."""
    MODELS.shutdown(wait=False, cancel_futures=True)
    Race.stop.set()


# --- the page


def run(race: Race, view: Callable[[], Any], look: Callable[[Any], Shown], empty: str) -> Iterator[Shown]:
    """Run a race and yield what to show; only the headline changes until it is over.

    Args:
        view: creates the view of the request. It and the race raise ValidationError or EngineError.
        look: what to show of a race that is over.
        empty: the stage until then.
    """
    yield hint("Waiting for the model …"), empty
    try:
        for now in race.run(view()):
            yield look(now) if now.over else (measuring(now), gr.skip())
    except ValidationError as error:
        first = error.errors()[0]
        yield refusal(f"{first['loc'][0]}: {first['msg']}."), gr.skip()
    except EngineError as error:
        yield refusal(str(error)), gr.skip()
    except Exception as error:  # any error of the model is shown on the page
        traceback.print_exc(file=sys.stderr)
        yield refusal(f"The model failed: {first_line(error)}"), gr.skip()


def panes(name: str, start: str, empty: str, legend: str) -> list[Component]:
    """Create headline, stage and replay buttons in the current page."""
    summary = gr.HTML(start, elem_id=f"mm-{name}-summary")
    stage = gr.HTML(empty, elem_id=f"mm-{name}-race")
    with gr.Row(elem_classes="mm-replay"):
        gr.HTML(f'<div class="mm-legend" role="note" aria-label="what the colours mean">{legend}</div>')
        for label, rate in (("Replay", 1), ("Replay slowly", 0.25)):
            gr.Button(label, size="sm", scale=0).click(None, js=REPLAY.format(stage.elem_id, rate), **QUICK)
    return [summary, stage]


def buttons(tab: str, start: str) -> list[gr.Button]:
    """A row of two buttons: one starts a run, the other stops it."""
    with gr.Row():
        run = gr.Button(start, variant="primary", elem_id=f"mm-{tab}-run", min_width=80)
        return [run, gr.Button("Stop", variant="stop", elem_id=f"mm-{tab}-stop", min_width=80)]


def connect(
    triggers: Sequence[Callable[..., Dependency]], work: Callable[..., Iterator[object]], given: Sequence[Component],
    shown: Sequence[Component], stop: gr.Button,
) -> None:  # fmt: skip
    """Connect a run to the events that start it, and to the button that stops it; `shown` begins with the headline.

    Inputs are not preprocessed: gradio would open uploads in this process. `work` gets them as the page sent them.
    """
    running = gr.on(
        triggers, work, given, shown, preprocess=False, concurrency_id=QUEUE, concurrency_limit=1,
        show_progress="minimal", show_progress_on=shown[0], api_visibility="private",
    )  # fmt: skip
    gr.on(triggers, None, js=SHOW.format(shown[0].elem_id), **QUICK)
    stop.click(lambda: hint("Stopped."), None, shown[0], cancels=running, **QUICK)


def control(kind: type[BaseModel], name: str, value: Any = None, **more: Any) -> Component:
    """The control for a field of a request: a checkbox, or a slider within the field's bounds.

    Its label and explanation are the field's title and description.
    """
    field = kind.model_fields[name]
    value = field.default if value is None else value
    words = {"label": field.title, "info": field.description, **more}
    if isinstance(value, bool):
        return gr.Checkbox(value, **words)
    low, high = (next(getattr(bound, at) for bound in field.metadata if hasattr(bound, at)) for at in ("ge", "le"))
    if high > 1000:  # too many values for a slider
        return gr.Number(value, precision=0, minimum=low, maximum=high, **words)
    return gr.Slider(low, high, value, step=0.05 if isinstance(value, float) else 1, **words)


# --- HTML


def speed_factor(view: RaceView) -> float:
    """The factor by which a replay is faster than the run."""
    return max(1.0, max(view.plain.seconds, view.fast.seconds) / LONGEST)


def stage(view: RaceView, about: Sequence[str], bodies: Sequence[str]) -> str:
    """Both sides next to each other, each with a description, its figures and its body; time bars have one scale."""
    fast = speed_factor(view)
    longest = max(view.plain.seconds, view.fast.seconds) or 1.0
    panes = "".join(
        f'<section class="mm-pane" aria-label="{title}"><header><h3>{title}</h3>{_clock(one, fast)}'
        f'<p>{escape(words)}</p></header><div class="mm-lane">{_lane(one, longest, fast)}</div>{body}'
        f'<p class="mm-small">{_figures(one)}</p></section>'
        for title, one, words, body in zip(TITLES, (view.plain, view.fast), about, bodies, strict=True)
    )
    return f'<div class="mm-race">{panes}</div>'


def _figures(one: RaceSide) -> str:
    if not one.count:
        return ""
    rate = f"{one.count / one.seconds:.1f} tokens/s"
    return f"{one.count} tokens in {one.forwards} forwards, {rate}, first token after {duration(one.first)}"


def _lane(one: RaceSide, longest: float, fast: float) -> str:
    """The time bar; empty before a run, since an existing element would not be animated again."""
    if not one.seconds:
        return ""
    return f'<i style="--w:{100 * one.seconds / longest:.1f}%;--for:{one.seconds / fast:.3f}"></i>'


def _clock(one: RaceSide, fast: float) -> str:
    if one.state in (WAITING, RUNNING):
        return ""
    text = duration(one.seconds) if one.state == DONE else one.state
    return f'<b class="mm-clock" {moment(one.seconds, fast)}>{text}</b>'


def moment(seconds: float, fast: float) -> str:
    """The HTML attribute that says when an element appears in the replay."""
    return f'style="--t:{seconds / fast:.3f}"'


def headline(view: RaceView, speed_up: float | None, per_forward: float, badge: tuple[str, str], *notes: str) -> str:
    """The speed-up, green if it is a gain; tokens per forward; the badge as (kind, text); and notes."""
    big = "–" if speed_up is None else f"{speed_up:.2f}×"
    gain = ' class="mm-gain"' * (speed_up is not None and speed_up >= 1)
    words = "the speed" if speed_up is not None and speed_up < 1 else "as fast"
    if (fast := speed_factor(view)) > 1:
        notes = (*notes, f"Replayed {fast:.1f}× as fast as it ran.")
    small = "".join(f'<p class="mm-small">{note}</p>' for note in notes if note)
    return (
        f'<div class="mm-summary"><p{gain}><strong>{big}</strong> {words}</p>'
        f"<p><strong>{per_forward:.2f}</strong> tokens per forward</p>"
        f'<p class="mm-badge mm-{badge[0]}" role="status">{badge[1]}</p>{small}</div>'
    )


def hint(words: str) -> str:
    return f'<div class="mm-summary"><p class="mm-hint" role="status">{words}</p></div>'


def measuring(view: RaceView) -> str:
    """The progress of the run that is being measured."""
    name, one = ("plain", view.plain) if view.plain.state in (WAITING, RUNNING) else ("mmspec", view.fast)
    return hint(f"Measuring {name}: {one.count} tokens in {duration(one.seconds)}. The replay follows.")


def refusal(message: str) -> str:
    return f'<div class="mm-summary"><p class="mm-badge mm-different" role="alert">{escape(message)}</p></div>'


def duration(seconds: float) -> str:
    """12.3 ms, 456 ms, 1.23 s, 12.3 s."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
