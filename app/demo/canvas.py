"""One prompt drawn twice at one seed, by plain decoding and accelerated, and the token grid while it fills."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from mmspec.app import embedded
from mmspec.app.demo.answer import DONE, WAITING
from mmspec.app.demo.race import DRAWING, TIME_LIMIT, Limits, Race, Raced, painted
from mmspec.app.demo.wish import LOSSLESS, METHODS, TRAINED, PromptWish
from mmspec.app.painter import DrawingMethod, ImageResult, ImageSubject
from mmspec.pipelines.llamagen.pipeline import CLASS, TEXT


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
        pair = Pair(Canvas(False, self.grid), Canvas(True, self.grid), wish, wish.spec(self.codes))
        return pair, self.painter.label(wish.prompt.strip())

    def side(self, both: Pair, one: Canvas, asked: Any, limits: Limits) -> Iterator[None]:
        wish = both.wish
        self.painter.go(self.way(wish) if one.accelerated else self.painter.plain)
        settings = {"guidance_scale": wish.guidance, "temperature": wish.temperature}

        def paint(seen: Any) -> ImageResult:
            return self.painter.paint([asked], [wish.seed], callback_on_step_end=seen, **settings)

        return painted(one, paint, self._look, limits)

    def end(self, both: Pair, asked: Any, limits: Limits) -> Pair:
        return replace(both, over=True)

    def rest(self) -> None:
        self.painter.go(self.painter.plain)

    def warm_up(self, prompt: str) -> None:
        """Pay for what only the first run of a process costs."""
        self.whole(PromptWish(prompt, guidance=self.guidance))

    @torch.no_grad()
    def _look(self, tokens: list[int]) -> Image.Image:
        """The picture so far; what is not drawn yet is filled with the last token."""
        pipe, size = self.painter.pipe, self.grid**2
        ids = torch.tensor([*tokens, *tokens[-1:] * (size - len(tokens))], device=self.painter.device)
        pixels = pipe.vqvae.decode(ids.view(1, self.grid, self.grid)).float()
        return pipe.image_processor.postprocess(pixels, "pil")[0]


def load(model: str, drafter: str | None, device: str, dtype: str, time_limit: float) -> Easel:
    """Easel for the embedded image model, a folder or a name on the Hub.

    Raises:
        EngineError: it cannot be loaded.
    """
    from mmspec.app.painter import load as load_painter

    own = embedded.IMAGE_DRAFTER if model == embedded.IMAGE_MODEL else None
    return Easel(load_painter(model, device, dtype), embedded.fitting(drafter, model) if drafter else own, time_limit)
