"""One wish drawn twice at one seed, by plain decoding and accelerated: when each place of the grid was there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from mmspec.app import embedded
from mmspec.app.demo.race import DONE, TIME_LIMIT, Limits, Race, RaceSide
from mmspec.app.demo.wish import LOSSLESS, METHODS, TRAINED, PromptWish
from mmspec.app.painter import DrawingMethod, ImageResult, ImageSubject
from mmspec.pipelines.llamagen.pipeline import CLASS, TEXT


@dataclass
class Canvas(RaceSide):
    """One of the two pictures; `at` has an entry for each place of its grid, row by row.

    Attributes:
        begins: of each forward, the first place that it gave.
        made: the pipeline's own result, once it is there.
    """

    begins: list[int] = field(default_factory=list)
    image: Image.Image | None = None
    made: Any = None

    @classmethod
    def empty(cls, grid: int) -> Canvas:
        return cls(at=[0.0] * grid**2)

    @property
    def grid(self) -> int:
        return round(len(self.at) ** 0.5)

    def take(self, known: Sequence[bool], seconds: float) -> None:
        """Book a forward, by the places that are there after it."""
        new = [place for place, there in enumerate(known) if there and not self.at[place]]
        for place in new:
            self.at[place] = seconds
        self.begins += new[:1]
        self.calls.append(len(new))
        self.seconds = seconds

    def draw(self, paint: Callable[[Any], Any], known: Callable[[Any], Sequence[bool]], limits: Limits) -> None:
        """Fill it.

        Args:
            paint: a call of a pipeline, which tells the callback it is given of each forward.
            known: the places that are there, from the tokens of one picture so far.
        """
        began = time.perf_counter()

        def seen(_: Any, __: int, ___: int, state: dict[str, Any]) -> None:
            if limits.over:
                raise Ended
            self.take(known(state["tokens"][0]), time.perf_counter() - began)

        with contextlib.suppress(Ended):
            self.made = paint(seen)
            self.image, self.seconds, self.state = self.made.images[0], self.made.seconds, DONE


class Ended(Exception):
    """Thrown into a call of a pipeline to end it."""


@dataclass(frozen=True)
class Pair:
    """What there is to see at one moment of a run.

    Attributes:
        rule: as it was enabled.
        fewer: passes and seconds of plain drawing with many tokens in each, of a MAR.
    """

    plain: Canvas
    fast: Canvas
    wish: Any
    rule: str
    over: bool = False
    fewer: tuple[int, float] | None = None

    @property
    def speed_up(self) -> float | None:
        done = self.plain.state == self.fast.state == DONE
        return self.plain.seconds / self.fast.seconds if done else None

    @property
    def same(self) -> int:
        """Places of the grid where both have the same token."""
        return int((self.plain.made.tokens == self.fast.made.tokens).sum())


class Easel(Race):
    """Both ways to draw of one loaded pipeline; one run at a time."""

    def __init__(self, painter: ImageSubject, drafter: Any = None, time_limit: float = TIME_LIMIT) -> None:
        self.painter, self.drafter, self.time_limit = painter, drafter, time_limit
        self.grid = painter.pipe.transformer.config.grid
        self.codes = painter.pipe.transformer.config.vocab
        given = {**(CLASS if painter.classes else TEXT), **painter.pipe.config.defaults}
        self.guidance, self.temperature = given["guidance_scale"], given["temperature"]
        self.methods = METHODS if drafter is None else {**METHODS, **TRAINED}

    def way(self, wish: PromptWish) -> DrawingMethod:
        """How to decode for a wish."""
        options = dict(self.methods[wish.method])
        if wish.rule != LOSSLESS:
            options |= {"rule": wish.spec(self.codes)} | ({"budget": wish.budget} if wish.budget else {})
        if wish.method in TRAINED:
            return DrawingMethod(self.drafter, options)
        return DrawingMethod("jacobi", {"window": wish.window, **options})

    def begin(self, wish: PromptWish, stop: threading.Event) -> tuple[Pair, Any]:
        wish.check(self.methods)
        pair = Pair(Canvas.empty(self.grid), Canvas.empty(self.grid), wish, wish.spec(self.codes))
        return pair, self.painter.label(wish.prompt.strip())

    def side(self, both: Pair, one: Canvas, asked: Any, limits: Limits) -> None:
        wish = both.wish
        self.painter.go(self.way(wish) if one is both.fast else self.painter.plain)
        settings = {"guidance_scale": wish.guidance, "temperature": wish.temperature}

        def paint(seen: Any) -> ImageResult:
            return self.painter.paint([asked], [wish.seed], callback_on_step_end=seen, **settings)

        one.draw(paint, lambda tokens: [True] * len(tokens), limits)  # they come row by row

    def end(self, both: Pair, asked: Any, limits: Limits) -> Pair:
        return replace(both, over=True)

    def rest(self) -> None:
        self.painter.go(self.painter.plain)

    def warm_up(self, prompt: str) -> None:
        """Pay for what only the first run of a process costs."""
        self.whole(PromptWish(prompt, guidance=self.guidance))


def load(model: str, drafter: str | None, device: str, dtype: str, time_limit: float) -> Easel:
    """Easel for the embedded image model, a folder or a name on the Hub.

    Raises:
        EngineError: it cannot be loaded.
    """
    from mmspec.app.painter import load as load_painter

    own = embedded.IMAGE_DRAFTER if model == embedded.IMAGE_MODEL else None
    return Easel(load_painter(model, device, dtype), embedded.fitting(drafter, model) if drafter else own, time_limit)
