"""One class drawn twice at one seed by a MAR, plainly and by speculation, exactly or by CSpD's rule."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmspec.app.demo.canvas import Canvas, Pair
from mmspec.app.demo.desk import MAX_SEED, RefusedError, within
from mmspec.app.demo.race import TIME_LIMIT, Limits, Race
from mmspec.app.demo.wish import MAX_GUIDANCE
from mmspec.app.mar import MarImages, MarSubject

MAX_AHEAD = 16
FEWER = 4  # times fewer passes than tokens: how such models are drawn where exactness is not asked
ITSELF, SMALLER, CSPD = "exact, own drafts", "exact, drafts of a smaller MAR", "CSpD, approximate"


@dataclass(frozen=True)
class ClassWish:
    """A class to draw and how, as it came from the page."""

    label: str
    mode: str = ITSELF
    ahead: int = 4
    prefill: float = 0.0
    seed: int = 0
    guidance: float = 3.0


class Studio(Race):
    """Both ways to draw of one loaded MAR; one run at a time.

    Attributes:
        measured: the bench's records of how good this model's pictures are, by method.
    """

    def __init__(
        self, model: MarSubject, time_limit: float = TIME_LIMIT, measured: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.time_limit, self.measured = model, time_limit, measured or {}
        self.note = model.singly()  # for both alike
        self.grid = model.pipe.transformer.config.grid
        self.guidance = model.settings.get("guidance_scale", model.pipe.config.defaults.get("guidance_scale", 3.0))
        self.modes = [ITSELF] + [SMALLER, CSPD] * (model.draft is not None)

    def begin(self, wish: ClassWish, stop: threading.Event) -> tuple[Pair, int]:
        within(wish, {"ahead": (1, MAX_AHEAD), "prefill": (0, 1), "seed": (0, MAX_SEED), "guidance": (1, MAX_GUIDANCE)})
        if wish.mode not in self.modes:
            raise RefusedError(f"No mode {wish.mode!r} here; choose from {'; '.join(self.modes)}.")
        rule = "cspd" if wish.mode == CSPD else "exact"
        return Pair(Canvas.empty(self.grid), Canvas.empty(self.grid), wish, rule), self.model.label(wish.label)

    def side(self, both: Pair, one: Canvas, asked: int, limits: Limits) -> None:
        wish = both.wish
        how: dict[str, Any] = {"ahead": wish.ahead, "prefill": wish.prefill}
        how |= {} if wish.mode == ITSELF else {"draft": self.model.draft}
        how |= {"rule": "cspd"} if wish.mode == CSPD else {}

        def paint(seen: Any) -> MarImages:
            way = how if one is both.fast else self.model.plain
            return self.model.draw([asked], [wish.seed], way, callback_on_step_end=seen, guidance_scale=wish.guidance)

        one.draw(paint, lambda tokens: tokens.any(1).tolist(), limits)

    def end(self, both: Pair, asked: int, limits: Limits) -> Pair:
        """With plain drawing in fewer passes beside them."""
        fewer = None
        if both.speed_up is not None and not limits.over:
            settings = {"guidance_scale": both.wish.guidance, "num_inference_steps": max(1, self.model.tokens // FEWER)}
            made = self.model.draw([asked], [both.wish.seed], None, **settings)
            fewer = made.work["passes"], made.seconds
        return replace(both, over=True, fewer=fewer)

    def warm_up(self) -> None:
        """Pay for what only the first run of a process costs."""
        self.whole(ClassWish("0", guidance=self.guidance))
