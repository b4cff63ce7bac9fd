"""One prompt drawn twice at one seed, by plain decoding and accelerated, and the token grid while it fills."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from PIL import Image

from mmspec.app import embedded
from mmspec.app.demo.answer import DONE, STOPPED, TIMED_OUT, WAITING
from mmspec.app.demo.desk import RefusedError
from mmspec.app.demo.wish import FEATURE, LOSSLESS, METHODS, PromptWish
from mmspec.app.engine import EngineError
from mmspec.app.painter import DrawingMethod, ImageResult, ImageSubject
from mmspec.pipelines.llamagen.pipeline import CLASS, TEXT

DRAWING = "drawing"
REFRESH = 0.25  # seconds between two looks at a picture under way


@dataclass
class Canvas:
    """One of the two pictures while it is drawn."""

    accelerated: bool
    grid: int
    state: str = WAITING
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # where in a draft each token stood; 0: the target's own
    gains: list[int] = field(default_factory=list)  # tokens that each forward after the prefill gave
    prefill: float = 0.0
    seconds: float = 0.0  # without the time that the looks took
    image: Image.Image | None = None
    spent: float = 0.0  # what a relaxed rule was charged, known at the end

    def take(self, _: int, tokens: list[int], seconds: float) -> None:
        """Book a round, by all tokens that there are after it."""
        new, self.seconds, self.state = len(tokens) - len(self.tokens), seconds, DRAWING
        if self.tokens:
            self.gains.append(new)
        else:
            self.prefill = seconds
        self.depths += [*range(1, new), 0]
        self.tokens = tokens

    def finish(self, painting: ImageResult, seconds: float) -> None:
        if painting.stats.accepted > self.accepted:  # the last round ended among its drafted tokens
            self.depths[-1] = self.depths[-2] + 1
        self.image, self.spent, self.seconds, self.state = painting.images[0], painting.spent[0], seconds, DONE

    @property
    def accepted(self) -> int:
        return sum(depth > 0 for depth in self.depths)

    @property
    def forwards(self) -> int:
        """Of the target, the prefill among them."""
        return len(self.gains) + bool(self.tokens)


class Raced:
    """Two pictures, drawn one after the other."""

    plain: Any
    fast: Any

    @property
    def speed_up(self) -> float | None:
        done = self.plain.state == self.fast.state == DONE
        return self.plain.seconds / self.fast.seconds if done else None


@dataclass(frozen=True)
class Pair(Raced):
    """What there is to see at one moment of a run."""

    plain: Canvas
    fast: Canvas
    wish: PromptWish
    rule: str  # as it was enabled
    over: bool = False

    @property
    def same(self) -> int:
        """Places of the grid where both have the same token."""
        return sum(a == b for a, b in zip(self.plain.tokens, self.fast.tokens, strict=False))


class Easel:
    """Both ways to draw of one loaded pipeline; one run at a time."""

    def __init__(self, painter: ImageSubject, drafter: Any = None, time_limit: float = 120.0) -> None:
        self.painter, self.drafter, self.time_limit = painter, drafter, time_limit
        self.grid = painter.pipe.transformer.config.grid
        self.codes = painter.pipe.transformer.config.vocab
        given = {**(CLASS if painter.classes else TEXT), **painter.pipe.config.defaults}
        self.guidance, self.temperature = given["guidance_scale"], given["temperature"]
        self.methods = METHODS if drafter is None else {**METHODS, **FEATURE}

    def way(self, wish: PromptWish) -> DrawingMethod:
        """How to decode for a wish."""
        options = dict(self.methods[wish.method])
        if wish.rule != LOSSLESS:
            options |= {"rule": wish.spec(self.codes)} | ({"budget": wish.budget} if wish.budget else {})
        if wish.method in FEATURE:
            return DrawingMethod(self.drafter, options)
        return DrawingMethod("jacobi", {"window": wish.window, **options})

    def run(self, wish: PromptWish, stop: threading.Event) -> Iterator[Pair]:
        """Looks at a run while it goes on; the last one is of its end.

        Raises:
            RefusedError: the wish is not run.
        """
        wish.check(self.methods)
        asked = self._asked(wish.prompt)
        pair = Pair(Canvas(False, self.grid), Canvas(True, self.grid), wish, wish.spec(self.codes))
        limits = Limits(stop, time.monotonic() + self.time_limit)
        settings = {"guidance_scale": wish.guidance, "temperature": wish.temperature}

        def paint(seen: Any) -> ImageResult:
            return self.painter.paint([asked], [wish.seed], callback_on_step_end=seen, **settings)

        try:
            for canvas, way in ((pair.plain, DrawingMethod()), (pair.fast, self.way(wish))):
                handle = None if limits.over else self.painter.go(way)
                if wish.method in FEATURE and handle is not None:
                    self.drafter = handle.drafter  # read from its file once
                yield from painted(pair, canvas, paint, self._look, limits)
            yield Pair(pair.plain, pair.fast, wish, pair.rule, over=True)
        except EngineError as error:
            raise RefusedError(str(error)) from error
        finally:
            self.painter.go(DrawingMethod())

    def warm_up(self, prompt: str) -> None:
        """Pay for what only the first run of a process costs."""
        for _ in self.run(PromptWish(prompt, guidance=self.guidance), threading.Event()):
            pass

    def _asked(self, prompt: str) -> Any:
        if not self.painter.classes:
            return prompt.strip()
        if not prompt.strip().isdecimal() or int(prompt) >= self.painter.classes:
            raise RefusedError(f"This model draws classes: write a number from 0 to {self.painter.classes - 1}.")
        return int(prompt)

    @torch.no_grad()
    def _look(self, tokens: list[int]) -> Image.Image:
        """The picture so far; what is not drawn yet is filled with the last token."""
        pipe, size = self.painter.pipe, self.grid**2
        ids = torch.tensor([*tokens, *tokens[-1:] * (size - len(tokens))], device=self.painter.device)
        pixels = pipe.vqvae.decode(ids.view(1, self.grid, self.grid)).float()
        return pipe.image_processor.postprocess(pixels, "pil")[0]


class Ended(Exception):
    """Thrown into a call of a pipeline to end it, and put into the queue when it has ended."""


@dataclass(frozen=True)
class Limits:
    """When a run has to end."""

    stop: threading.Event
    deadline: float  # of time.monotonic

    @property
    def over(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.deadline


def painted(
    both: Any, canvas: Any, paint: Callable[[Any], Any], look: Callable[[Any], Image.Image], limits: Limits
) -> Iterator[Any]:
    """Draw one of two pictures in a thread of its own; yields `both` when there is something new to see.

    Args:
        canvas: takes what there is after each step, and finishes with what `paint` gives.
        paint: a call of a pipeline, which tells the callback it is given of each step.
        look: the picture so far, of its tokens.
    """

    def work(show: Callable[[], None]) -> None:
        began = shown = time.perf_counter()
        spent = 0.0  # on looking, which is not the model's time

        def seen(_: Any, step: int, __: int, state: dict[str, Any]) -> None:
            nonlocal shown, spent
            now = time.perf_counter()
            if limits.over:
                raise Ended
            canvas.take(step, state["tokens"][0], now - began - spent)
            if now - shown >= REFRESH:
                canvas.image = look(state["tokens"][0])
                show()
                shown = time.perf_counter()
                spent += shown - now

        made = paint(seen)
        canvas.finish(made, made.seconds - spent)

    if not limits.over:
        canvas.state = DRAWING
        with contextlib.closing(watched(work)) as looks:
            for _ in looks:
                yield both
    if canvas.state != DONE:
        canvas.state = STOPPED if limits.stop.is_set() else TIMED_OUT


def watched(work: Callable[[Callable[[], None]], None]) -> Generator[None, None, None]:
    """Run `work` in a thread of its own; yields when it begins, ends, or calls what it is given.

    What it calls raises Ended once nobody looks any more.
    """
    looks: SimpleQueue[BaseException | None] = SimpleQueue()
    closed = threading.Event()

    def show() -> None:
        if closed.is_set():
            raise Ended
        looks.put(None)

    def whole() -> None:
        try:
            work(show)
            looks.put(Ended())
        except BaseException as error:  # it belongs to whoever iterates
            looks.put(error)

    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    try:
        yield
        while not isinstance(look := looks.get(), Ended):
            if isinstance(look, BaseException):
                raise look
            yield
        yield
    finally:
        closed.set()
        thread.join()


def load(model: str, drafter: str | None, device: str, dtype: str, time_limit: float) -> Easel:
    """Easel for the embedded image model, a folder or a name on the Hub.

    Raises:
        EngineError: it cannot be loaded.
    """
    from mmspec.app.painter import load as load_painter

    own = embedded.IMAGE_DRAFTER if model == embedded.IMAGE_MODEL else None
    return Easel(load_painter(model, device, dtype), drafter or own, time_limit)
