"""Draws a picture twice from one seed, token by token and with drafts, and records the time of each token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from mmspec.app.compare import PLAIN, Method
from mmspec.app.demo.captions import MAX_PROMPT, MAX_SEED
from mmspec.app.demo.race import DONE, RUNNING, TIME_LIMIT, TIMED_OUT, Limits, Race, RaceSide, RaceView, RefusedError
from mmspec.app.mar import MarSubject
from mmspec.app.painter import ImageSubject, sweeps
from mmspec.pipelines.llamagen.pipeline import CLASS, TEXT

EXACT = "exact"
RULES = tuple(sweeps(1024))  # families of relaxed rules, each with settings from mild to bold
SEED_EXACT, COUPLED = "jacobi, seed-exact", "jacobi, maximal coupling"
METHODS: dict[str, dict[str, object]] = {  # options of the Jacobi drafter; the page adds the window
    SEED_EXACT: {"reproducible": True},
    COUPLED: {"coupling": "maximal"},
    "jacobi, gumbel coupling": {"coupling": "gumbel"},
    "jacobi, uncoupled (SJD)": {"coupling": "none"},
    "jacobi, proactive tree (SJD-PAC)": {"coupling": "maximal", "proactive": (3, 3)},
}
TRAINED: dict[str, dict[str, object]] = {"trained drafter": {}, "trained drafter, seed-exact": {"reproducible": True}}
OF_MAR = OWN_DRAFTS, SMALL_DRAFTS, CSPD = "exact, own drafts", "exact, drafts of a smaller MAR", "CSpD, approximate"


def seed_exact(method: str) -> bool:
    """Whether a method draws exactly the tokens that plain decoding draws with the same seed."""
    return bool({**METHODS, **TRAINED}.get(method, {}).get("reproducible"))


class Drawing(BaseModel, frozen=True):
    """A picture to draw and its settings, as received from the page."""

    prompt: str = Field(max_length=MAX_PROMPT)  # or a class
    method: str = SEED_EXACT
    window: int = Field(default=16, ge=1, le=64)  # tokens verified in one forward
    rule: str = EXACT
    boldness: int = Field(default=2, ge=1, le=5)  # of the rule
    prefill: float = Field(default=0.0, ge=0, le=1)  # share of tokens that a MAR draws before it drafts
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    guidance: float = Field(default=3.0, ge=1, le=20)
    temperature: float = Field(default=1.0, ge=0, le=2)

    @property
    def same(self) -> bool:
        """Whether the accelerated picture must be the plain one."""
        return seed_exact(self.method) or self.temperature == 0


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
    def grid(self) -> int:
        return round(len(self.at) ** 0.5)

    def take(self, known: list[bool], seconds: float) -> None:
        """Record a forward, given which tokens are known after it."""
        new = [place for place, there in enumerate(known) if there and not self.at[place]]
        for place in new:
            self.at[place] = seconds
        self.begins += new[:1]
        self.calls.append(len(new))
        self.seconds = seconds


@dataclass
class Pair(RaceView[TokenGrid]):
    drawing: Drawing
    rule: str = EXACT  # in the format of `enable`

    @property
    def speed_up(self) -> float | None:
        return self.plain.seconds / self.fast.seconds if self.ended else None

    @property
    def same(self) -> int:
        """Number of positions where both pictures have the same token."""
        return int((self.plain.result.tokens == self.fast.result.tokens).sum())


class Ended(Exception):
    """Raised in a pipeline's callback to end its call."""


class ImageRace(Race[Pair]):
    """Plain decoding and speculation with one loaded LlamaGenPipeline."""

    classes = False  # whether the page offers classes instead of prompts
    usual = SEED_EXACT
    note = ""  # how the settings of both sides differ from the model's own

    def __init__(self, subject: ImageSubject, drafter: object = None, time_limit: float = TIME_LIMIT) -> None:
        self.subject: Any = subject
        self.drafter, self.time_limit = drafter, time_limit
        config = subject.pipe.transformer.config
        self.grid, self.codes = config.grid, config.vocab
        given = {**(CLASS if subject.classes else TEXT), **subject.pipe.config.defaults}
        self.guidance, self.temperature = given["guidance_scale"], given["temperature"]
        self.methods = [*METHODS, *(TRAINED if drafter is not None else ())]

    def pair(self, drawing: Drawing) -> Pair:
        """Two empty pictures."""
        plain, fast = (TokenGrid(at=[0.0] * self.grid**2) for _ in range(2))
        return Pair(plain, fast, drawing)

    def measure(self, view: Pair, limits: Limits) -> None:
        drawing = view.drawing
        if not drawing.prompt.strip():
            raise RefusedError("The prompt is empty. Write what to draw.")
        condition, view.rule = self.subject.label(drawing.prompt.strip()), self.rule(drawing)
        for picture, fast in ((view.plain, False), (view.fast, True)):
            self._draw(picture, self.call(drawing, condition, fast), limits)

    def _draw(self, picture: TokenGrid, call: Callable[..., Any], limits: Limits) -> None:
        began = time.perf_counter()

        def seen(_: object, __: int, ___: int, state: dict[str, Tensor]) -> None:
            if limits.over:
                raise Ended
            picture.take(self.known(state["tokens"][0]), time.perf_counter() - began)

        picture.state = RUNNING
        try:
            picture.result = call(callback_on_step_end=seen)
        except Ended:
            picture.state = TIMED_OUT
        else:
            result = picture.result
            picture.image, picture.seconds, picture.state = result.images[0], result.seconds, DONE

    def rule(self, drawing: Drawing) -> str:
        """The rule in the format of `enable`. Raises RefusedError: the method does not allow it."""
        if drawing.rule == EXACT:
            return EXACT
        if seed_exact(drawing.method):
            raise RefusedError(
                f"{drawing.method} draws the very picture of plain decoding, which a relaxed rule would change. Choose "
                "another method, or set the rule back to exact."
            )
        points = sweeps(self.codes)[drawing.rule]
        return points[min(drawing.boldness, len(points)) - 1][1]

    def call(self, drawing: Drawing, condition: Any, fast: bool) -> Callable[..., Any]:
        """The call of the pipeline as a function, which takes the callback for each forward."""
        way = PLAIN
        if fast:
            trained = drawing.method in TRAINED
            options = {**METHODS, **TRAINED}[drawing.method] | ({} if trained else {"window": drawing.window})
            relaxed = {} if drawing.rule == EXACT else {"rule": self.rule(drawing)}
            way = Method(drawing.method, self.drafter if trained else "jacobi", options | relaxed)
        self.subject.go(way)
        settings = {"guidance_scale": drawing.guidance, "temperature": drawing.temperature}
        return partial(self.subject.paint, [condition], [drawing.seed], **settings)

    def known(self, tokens: Tensor) -> list[bool]:
        """Which positions have tokens, given the tokens of one picture so far, which come row by row."""
        return [True] * len(tokens)

    def rest(self) -> None:
        self.subject.go(PLAIN)

    def warm_up(self, prompt: str) -> None:
        """A run, so that one-time costs do not fall on the first visitor."""
        deque(self.run(self.pair(Drawing(prompt=prompt, method=self.usual, guidance=self.guidance))), 0)


class MarRace(ImageRace):
    """The same for classes of a loaded MAR, exactly or by CSpD's rule."""

    classes = True
    usual = OWN_DRAFTS

    def __init__(self, subject: MarSubject, time_limit: float = TIME_LIMIT) -> None:
        self.subject, self.time_limit, self.note = subject, time_limit, subject.singly()
        self.grid = subject.pipe.transformer.config.grid
        self.guidance = subject.settings.get("guidance_scale", subject.pipe.config.defaults.get("guidance_scale", 3.0))
        self.methods = [OWN_DRAFTS, *((SMALL_DRAFTS, CSPD) if subject.draft is not None else ())]

    def rule(self, drawing: Drawing) -> str:
        return "cspd" if drawing.method == CSPD else EXACT

    def call(self, drawing: Drawing, condition: Any, fast: bool) -> Callable[..., Any]:
        options: dict[str, object] = {"ahead": drawing.window, "prefill": drawing.prefill}
        options |= {} if drawing.method == OWN_DRAFTS else {"draft": self.subject.draft}
        options |= {"rule": "cspd"} if drawing.method == CSPD else {}
        way = Method(drawing.method, drawing.method, options) if fast else PLAIN
        return partial(self.subject.draw, [condition], [drawing.seed], way, guidance_scale=drawing.guidance)

    def known(self, tokens: Tensor) -> list[bool]:
        return tokens.any(1).tolist()

    def rest(self) -> None:
        """Nothing to restore: each call sets its own speculation."""
