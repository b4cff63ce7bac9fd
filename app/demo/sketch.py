"""One class drawn twice at one seed by a MAR, plainly and by exact speculation, and its places while they fill."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from mmspec.app.demo.answer import DONE, STOPPED, TIMED_OUT, WAITING
from mmspec.app.demo.canvas import DRAWING, REFRESH, Ended, Looks, watched
from mmspec.app.demo.desk import MAX_SEED, RefusedError, within
from mmspec.app.engine import EngineError
from mmspec.app.mar import Mar

MAX_AHEAD = 16
MAX_GUIDANCE = 20
ITSELF, SMALLER = "its own drafts", "drafts of a smaller MAR"


@dataclass(frozen=True)
class Wish:
    """A class to draw and how, as it came from the page."""

    label: str
    mode: str = ITSELF
    ahead: int = 8
    seed: int = 0
    guidance: float = 3.0


@dataclass
class Sketch:
    """One of the two pictures while it is drawn.

    Attributes:
        known: of every place, the pass that drew it; 0: none yet.
        seconds: without the time that the looks took.
        work, told: see `MAROutput`; known at the end.
    """

    grid: int
    known: list[int]
    state: str = WAITING
    passes: int = 0
    seconds: float = 0.0
    image: Image.Image | None = None
    work: dict[str, int] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Two:
    """What there is to see at one moment of a run."""

    plain: Sketch
    fast: Sketch
    over: bool = False

    @property
    def speed_up(self) -> float | None:
        done = self.plain.state == self.fast.state == DONE
        return self.plain.seconds / self.fast.seconds if done else None


class Studio:
    """Both ways to draw of one loaded MAR; one run at a time."""

    def __init__(self, model: Mar, time_limit: float = 120.0) -> None:
        self.model, self.time_limit = model, time_limit
        self.grid = model.pipe.transformer.config.grid
        self.guidance = model.settings.get("guidance_scale", model.pipe.config.defaults.get("guidance_scale", 3.0))
        self.modes = [ITSELF] + [SMALLER] * (model.draft is not None)

    def run(self, wish: Wish, stop: threading.Event) -> Iterator[Two]:
        """Looks at a run while it goes on; the last one is of its end.

        Raises:
            RefusedError: the wish is not run.
        """
        within(wish, {"ahead": (1, MAX_AHEAD), "seed": (0, MAX_SEED), "guidance": (1, MAX_GUIDANCE)})
        if wish.mode not in self.modes:
            raise RefusedError(f"No mode {wish.mode!r} here; choose from {', '.join(self.modes)}.")
        how: dict[str, Any] = {"ahead": wish.ahead} | ({"draft": self.model.draft} if wish.mode == SMALLER else {})
        two = Two(self.blank(), self.blank())
        deadline = time.monotonic() + self.time_limit
        try:
            label = self.model.label(wish.label)
            for sketch, speculation in ((two.plain, None), (two.fast, how)):
                if not stop.is_set() and time.monotonic() < deadline:
                    for _ in self._draw(sketch, label, wish, speculation, stop, deadline):
                        yield two
                if sketch.state != DONE:
                    sketch.state = STOPPED if stop.is_set() else TIMED_OUT
            yield Two(two.plain, two.fast, over=True)
        except EngineError as error:
            raise RefusedError(str(error)) from error

    def blank(self) -> Sketch:
        return Sketch(self.grid, [0] * self.model.tokens)

    def warm_up(self) -> None:
        """Pay for what only the first run of a process costs."""
        for _ in self.run(Wish("0", guidance=self.guidance), threading.Event()):
            pass

    def _draw(
        self, sketch: Sketch, label: int, wish: Wish, speculation: Any, stop: threading.Event, deadline: float
    ) -> Looks:
        """Draw one picture in a thread of its own; yields when there is something new to see."""

        def work(show: Any) -> None:
            began = shown = time.perf_counter()
            spent = 0.0  # on looking, which is not the model's time

            def seen(_: Any, step: int, __: int, state: dict[str, Any]) -> None:
                nonlocal shown, spent
                now = time.perf_counter()
                if stop.is_set() or time.monotonic() >= deadline:
                    raise Ended
                sketch.passes, sketch.seconds = step + 1, now - began - spent
                new = state["tokens"][0].any(1).tolist()
                sketch.known = [was or (step + 1) * now for was, now in zip(sketch.known, new, strict=True)]
                if now - shown >= REFRESH:
                    sketch.image = self._look(state["tokens"])
                    show()
                    shown = time.perf_counter()
                    spent += shown - now

            settings = {"guidance_scale": wish.guidance, "callback_on_step_end": seen}
            made = self.model.draw([label], [wish.seed], speculation, **settings)
            sketch.image, sketch.work, sketch.told = made.images[0], made.work, made.told
            sketch.passes, sketch.seconds, sketch.state = made.work["passes"], made.seconds - spent, DONE

        sketch.state = DRAWING
        yield from watched(work)

    @torch.no_grad()
    def _look(self, tokens: torch.Tensor) -> Image.Image:
        """The picture so far."""
        return self.model.pipe.picture(tokens, "pil")[0]
