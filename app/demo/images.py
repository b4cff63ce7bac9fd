"""Draws a picture twice from one seed, token by token and with drafts, and records the time of each token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from mmspec.app.compare import PLAIN, Method
from mmspec.app.demo.captions import MAX_PROMPT, MAX_SEED, WARM_UP
from mmspec.app.demo.race import DONE, RUNNING, TIME_LIMIT, TIMED_OUT, Limits, Race, RaceSide, RaceView, RefusedError
from mmspec.app.image_model import MarSubject
from mmspec.app.painter import ImageSubject
from mmspec.pipelines.llamagen.pipeline import CLASS, TEXT

EXACT = "exact"
SEED_EXACT, COUPLED = "jacobi, seed-exact", "jacobi, maximal coupling"
METHODS: dict[str, dict[str, object]] = {  # options of the Jacobi drafter; the page adds the window
    SEED_EXACT: {"reproducible": True},
    COUPLED: {"coupling": "maximal"},
    "jacobi, uncoupled (SJD)": {"coupling": "none"},
}
TRAINED: dict[str, dict[str, object]] = {"trained drafter": {}, "trained drafter, seed-exact": {"reproducible": True}}
RELAXED = {SEED_EXACT: COUPLED, "trained drafter, seed-exact": "trained drafter"}  # seed-exact → that of relaxed rules
SAMPLING = {"guidance": "guidance_scale", "temperature": "temperature"}  # fields of a Drawing → the pipeline's names
OF_MAR = OWN_DRAFTS, SMALL_DRAFTS, CSPD = "exact, own drafts", "exact, drafts of a smaller MAR", "CSpD, approximate"


def relaxed(codes: int) -> list[str]:
    """A rule of each family, for a codebook of this size; LANTERN's k is its authors' share of their codebook."""
    k, quarter = min(10, codes - 1), max(1, codes // 4)
    return [
        "typical(epsilon=0.3, delta=0.05)", "scaled(omega=2.0)", f"lantern(k={max(1, codes // 16)}, delta=0.1)",
        f"lantern(k={k}, lam=5.0)", f"gsd(group={k})", f"grouped(cells={quarter})", f"pooled(cells={quarter})",
    ]  # fmt: skip


class Drawing(BaseModel, frozen=True):
    """A picture to draw and its settings, as received from the page; titles and descriptions are of its controls."""

    prompt: str = Field(max_length=MAX_PROMPT)  # or a class
    method: str = SEED_EXACT
    window: int = Field(default=16, ge=1, le=64, title="Window", description="tokens verified in one forward")
    rule: str = Field(default=EXACT, max_length=MAX_PROMPT)
    seed: int = Field(default=0, ge=0, le=MAX_SEED, title="Seed", description="of both pictures")
    guidance: float = Field(default=3.0, ge=1, le=20, title="Guidance", description="how closely to follow the prompt")
    temperature: float = Field(default=1.0, ge=0, le=2, title="Temperature", description="0 is greedy decoding")

    @property
    def used(self) -> str:
        """The method; one that draws the tokens of plain decoding allows no relaxed rule, and another replaces it."""
        return self.method if self.rule == EXACT else RELAXED.get(self.method, self.method)


@dataclass
class TokenGrid(RaceSide):
    """One of the two pictures; `at` has an entry for each token of its grid, row by row.

    Attributes:
        begins: for each forward, the position of its first token.
        result: the pipeline's result, at the end.
    """

    begins: list[int] = field(default_factory=list)
    image: Image.Image | None = None
    result: Any = None

    @property
    def forwards(self) -> int:
        """The number of forwards; a MAR's forwards without new tokens are counted only at the end."""
        return getattr(self.result, "work", {}).get("passes", len(self.calls))

    def take(self, drawn: list[bool], seconds: float) -> None:
        """Record a forward, given which tokens are drawn after it."""
        new = [place for place, there in enumerate(drawn) if there and not self.at[place]]
        for place in new:
            self.at[place] = seconds
        self.begins += new[:1]
        self.calls.append(len(new))
        self.seconds = seconds


@dataclass
class Pair(RaceView):
    drawing: Drawing

    @property
    def speed_up(self) -> float | None:
        return self.plain.seconds / self.fast.seconds if self.ended else None

    @property
    def same(self) -> int:
        """Number of positions where both pictures have the same token."""
        return int((self.plain.result.tokens == self.fast.result.tokens).sum())


class Ended(Exception):
    """Raised in a pipeline's callback to end its call."""


class ImageRace(Race):
    """Plain decoding and speculation with one loaded LlamaGenPipeline."""

    usual = SEED_EXACT
    note = ""  # how the settings of both sides differ from the model's own

    def __init__(self, subject: ImageSubject, drafter: object = None, time_limit: float = TIME_LIMIT) -> None:
        self.subject: Any = subject
        self.drafter, self.time_limit = drafter, time_limit
        self.rules = relaxed(subject.codes)
        given = {**(CLASS if subject.classes else TEXT), **subject.pipe.config.defaults}
        self.sampling = {"guidance": given["guidance_scale"], "temperature": given["temperature"]}  # usual values
        self.methods = [*METHODS, *(TRAINED if drafter is not None else ())]

    def pair(self, drawing: Drawing) -> Pair:
        """Two empty pictures."""
        plain, fast = (TokenGrid(at=[0.0] * self.subject.tokens) for _ in range(2))
        return Pair(plain, fast, drawing)

    def measure(self, view: Pair, limits: Limits) -> None:
        drawing = view.drawing
        if not drawing.prompt.strip():
            raise RefusedError("The prompt is empty. Write what to draw.")
        if drawing.method not in self.methods:
            raise RefusedError(f"There is no method {drawing.method!r}.")
        label = self.subject.label(drawing.prompt.strip())
        for pair, forwards in ((self.pair(drawing), WARM_UP), (view, math.inf)):  # one-time costs are not timed
            for picture, method in ((pair.plain, PLAIN), (pair.fast, self.method(drawing))):
                self.subject.go(method)
                call = partial(self.subject.paint, [label], [drawing.seed], **self.arguments(drawing))
                self._draw(picture, call, forwards, limits)

    def _draw(self, picture: TokenGrid, call: Callable[..., Any], forwards: float, limits: Limits) -> None:
        """Draw a picture, or its tokens of the first forwards."""
        began = time.perf_counter()

        def seen(_: object, __: int, ___: int, state: dict[str, Tensor]) -> None:
            if limits.over or len(picture.calls) >= forwards:
                raise Ended
            picture.take(self.drawn(state["tokens"][0]), time.perf_counter() - began)

        picture.state = RUNNING
        try:
            result = call(callback_on_step_end=seen)
        except Ended:
            picture.state = TIMED_OUT
        else:
            picture.result, picture.image, picture.seconds = result, result.images[0], result.seconds
            picture.state = DONE

    def method(self, drawing: Drawing) -> Method:
        """How the accelerated picture is drawn."""
        rule = {} if drawing.rule == EXACT else {"rule": drawing.rule}
        if drawing.used in TRAINED:
            return Method(drawing.used, self.drafter, TRAINED[drawing.used] | rule)
        return Method(drawing.used, "jacobi", METHODS[drawing.used] | {"window": drawing.window} | rule)

    def arguments(self, drawing: Drawing) -> dict[str, float]:
        """The pipeline's arguments for sampling."""
        return {SAMPLING[name]: getattr(drawing, name) for name in self.sampling}

    def drawn(self, tokens: Tensor) -> list[bool]:
        """Which positions are drawn, given the tokens of one picture so far, which come row by row."""
        return [True] * len(tokens)


class MarRace(ImageRace):
    """The same for classes of a loaded MAR, exactly or by CSpD's rule."""

    usual = OWN_DRAFTS

    def __init__(self, subject: MarSubject, time_limit: float = TIME_LIMIT) -> None:
        self.subject, self.time_limit, self.note = subject, time_limit, subject.singly()
        guidance = subject.settings.get("guidance_scale", subject.pipe.config.defaults.get("guidance_scale", 3.0))
        self.sampling = {"guidance": guidance}
        self.methods = [OWN_DRAFTS, *((SMALL_DRAFTS, CSPD) if subject.draft is not None else ())]

    def method(self, drawing: Drawing) -> Method:
        options: dict[str, object] = {"ahead": drawing.window}
        options |= {} if drawing.method == OWN_DRAFTS else {"draft": self.subject.draft}
        options |= {"rule": "cspd"} if drawing.method == CSPD else {}
        return Method(drawing.method, drawing.method, options)

    def drawn(self, tokens: Tensor) -> list[bool]:
        return tokens.any(1).tolist()
