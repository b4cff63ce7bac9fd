"""One class drawn twice at one seed by a MAR, plainly and by exact speculation, and its places while they fill."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.app.demo.answer import DONE, WAITING
from mmspec.app.demo.desk import MAX_SEED, RefusedError, within
from mmspec.app.demo.race import TIME_LIMIT, Limits, Race, Raced, painted
from mmspec.app.mar import MarImages, MarSubject

MAX_AHEAD = 16
MAX_GUIDANCE = 20
FEWER = 4  # times fewer passes than tokens: how such models are drawn where exactness is not asked
ITSELF, SMALLER = "its own drafts", "drafts of a smaller MAR"
CSPD = "drafts of a smaller MAR by CSpD's rule, approximate"


@dataclass(frozen=True)
class ClassWish:
    """A class to draw and how, as it came from the page."""

    label: str
    mode: str = ITSELF
    ahead: int = 4
    prefill: float = 0.0
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

    def take(self, step: int, tokens: Tensor, seconds: float) -> None:
        """Book a pass, by the tokens [grid², channels] after it."""
        self.passes, self.seconds = step + 1, seconds
        self.known = [was or (step + 1) * now for was, now in zip(self.known, tokens.any(1).tolist(), strict=True)]

    def finish(self, made: MarImages, seconds: float) -> None:
        self.image, self.work, self.told = made.images[0], made.work, made.told
        self.passes, self.seconds, self.state = made.work["passes"], seconds, DONE


@dataclass(frozen=True)
class Two(Raced):
    """What there is to see at one moment of a run."""

    plain: Sketch
    fast: Sketch
    wish: ClassWish
    over: bool = False
    fewer: tuple[int, float] | None = None  # passes and seconds of plain drawing with many tokens in each


class Studio(Race):
    """Both ways to draw of one loaded MAR; one run at a time."""

    def __init__(self, model: MarSubject, time_limit: float = TIME_LIMIT) -> None:
        self.model, self.time_limit = model, time_limit
        self.note = model.singly()  # for both alike
        self.grid = model.pipe.transformer.config.grid
        self.guidance = model.settings.get("guidance_scale", model.pipe.config.defaults.get("guidance_scale", 3.0))
        self.modes = [ITSELF] + [SMALLER, CSPD] * (model.draft is not None)

    def begin(self, wish: ClassWish, stop: threading.Event) -> tuple[Two, int]:
        within(wish, {"ahead": (1, MAX_AHEAD), "prefill": (0, 1), "seed": (0, MAX_SEED), "guidance": (1, MAX_GUIDANCE)})
        if wish.mode not in self.modes:
            raise RefusedError(f"No mode {wish.mode!r} here; choose from {', '.join(self.modes)}.")
        return Two(self.blank(), self.blank(), wish), self.model.label(wish.label)

    def side(self, both: Two, one: Sketch, asked: int, limits: Limits) -> Iterator[None]:
        wish = both.wish
        how: dict[str, Any] = {"ahead": wish.ahead, "prefill": wish.prefill}
        how |= {} if wish.mode == ITSELF else {"draft": self.model.draft}
        how |= {"rule": "cspd"} if wish.mode == CSPD else {}
        settings = {"guidance_scale": wish.guidance}

        def paint(seen: Any) -> MarImages:
            way = how if one is both.fast else self.model.plain
            return self.model.draw([asked], [wish.seed], way, callback_on_step_end=seen, **settings)

        return painted(one, paint, self._look, limits)

    def end(self, both: Two, asked: int, limits: Limits) -> Two:
        """With plain drawing in fewer passes beside them."""
        fewer = None
        if both.speed_up is not None and not limits.over:
            settings = {"guidance_scale": both.wish.guidance, "num_inference_steps": max(1, self.model.tokens // FEWER)}
            made = self.model.draw([asked], [both.wish.seed], None, **settings)
            fewer = made.work["passes"], made.seconds
        return replace(both, over=True, fewer=fewer)

    def blank(self) -> Sketch:
        return Sketch(self.grid, [0] * self.model.tokens)

    def warm_up(self) -> None:
        """Pay for what only the first run of a process costs."""
        self.whole(ClassWish("0", guidance=self.guidance))

    @torch.no_grad()
    def _look(self, tokens: Tensor) -> Image.Image:
        """The picture so far."""
        return self.model.pipe.picture(tokens[None], "pil")[0]
