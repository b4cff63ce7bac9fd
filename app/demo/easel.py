"""Draws one picture twice with the same seed, by plain decoding and accelerated, with the time of each token."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor

from mmspec.app.bench.image_methods import sweeps
from mmspec.app.bench.report import Record
from mmspec.app.compare import PLAIN, Method
from mmspec.app.demo.answer import MAX_PROMPT
from mmspec.app.demo.desk import MAX_SEED, RefusedError, within
from mmspec.app.demo.race import DONE, TIME_LIMIT, Limits, Race, RaceSide, RaceView
from mmspec.app.mar import MarImages, MarSubject
from mmspec.app.painter import ImageResult, ImageSubject
from mmspec.pipelines.llamagen.pipeline import CLASS, TEXT

MAX_WINDOW, MAX_AHEAD = 64, 16  # tokens verified in one forward: by Jacobi, and by a MAR
LOSSLESS = "exact"
FAMILIES = tuple(sweeps(1024))  # relaxed rules, each with settings from mild to bold
STEPS = 5  # levels of boldness
SEED_EXACT, COUPLED = "jacobi, seed-exact", "jacobi, maximal coupling"
METHODS: dict[str, dict[str, object]] = {  # options of the Jacobi drafter; the page adds the window
    SEED_EXACT: {"reproducible": True},
    COUPLED: {"coupling": "maximal"},
    "jacobi, gumbel coupling": {"coupling": "gumbel"},
    "jacobi, uncoupled (SJD)": {"coupling": "none"},
    "jacobi, proactive tree (SJD-PAC)": {"coupling": "maximal", "proactive": (3, 3)},
}
TRAINED: dict[str, dict[str, object]] = {"trained drafter": {}, "trained drafter, seed-exact": {"reproducible": True}}
OF_MAR = ITSELF, SMALLER, CSPD = "exact, own drafts", "exact, drafts of a smaller MAR", "CSpD, approximate"
FEWER = 4  # tokens per pass of the plain drawing with fewer passes, which is the usual way for a MAR
RANGES = {
    "boldness": (1, STEPS), "budget": (0, 1000), "prefill": (0, 1), "seed": (0, MAX_SEED), "guidance": (1, 20),
    "temperature": (0, 2),
}  # fmt: skip


def seed_exact(method: str) -> bool:
    """Whether a method draws exactly the tokens that plain decoding draws with the same seed."""
    return bool({**METHODS, **TRAINED}.get(method, {}).get("reproducible"))


@dataclass(frozen=True)
class Wish:
    """A picture to draw and its settings, as received from the page."""

    prompt: str  # or a class
    method: str = SEED_EXACT
    window: int = 16  # tokens verified in one forward
    rule: str = LOSSLESS
    boldness: int = 1  # 1 … STEPS, of the rule
    budget: float = 0.0  # limit of the rule's cost; 0: no limit
    prefill: float = 0.0  # for a MAR: the share of tokens that it draws before drafting begins
    seed: int = 0
    guidance: float = 3.0
    temperature: float = 1.0

    @property
    def same(self) -> bool:
        """Whether the accelerated picture must be the plain one."""
        return seed_exact(self.method) or self.temperature == 0

    def spec(self, codes: int) -> str:
        """The rule in the format of `enable`."""
        if self.rule == LOSSLESS:
            return LOSSLESS
        points = sweeps(codes)[self.rule]
        return points[min(self.boldness, len(points)) - 1][1]


@dataclass
class Canvas(RaceSide):
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

    def take(self, known: Sequence[bool], seconds: float) -> None:
        """Record a forward, given which tokens are known after it."""
        new = [place for place, there in enumerate(known) if there and not self.at[place]]
        for place in new:
            self.at[place] = seconds
        self.begins += new[:1]
        self.calls.append(len(new))
        self.seconds = seconds


class Ended(Exception):
    """Raised in a pipeline's callback to end its call."""


@dataclass(frozen=True)
class Pair(RaceView[Canvas]):
    """
    Attributes:
        rule: the rule in the format of `enable`.
        fewer: for a MAR, passes and seconds of plain drawing with many tokens per pass.
    """

    wish: Wish
    rule: str
    fewer: tuple[int, float] | None = None

    @property
    def speed_up(self) -> float | None:
        return self.plain.seconds / self.fast.seconds if self.ended else None

    @property
    def same(self) -> int:
        """Number of positions where both pictures have the same token."""
        return int((self.plain.result.tokens == self.fast.result.tokens).sum())


class Easel(Race[Wish, Pair, str | int]):
    """Plain decoding and speculation with one loaded pipeline; one run at a time."""

    # Fields of a Wish that the page has, in its order.
    asks = ["prompt", "method", "window", "rule", "boldness", "budget", "seed", "guidance", "temperature"]
    windows = (2, MAX_WINDOW)
    usual = SEED_EXACT
    ordered = True  # tokens come row by row
    note = ""  # how the settings differ from the model's own

    def __init__(self, subject: ImageSubject, drafter: object = None, time_limit: float = TIME_LIMIT) -> None:
        self.subject: Any = subject
        self.drafter, self.time_limit = drafter, time_limit
        config = subject.pipe.transformer.config
        self.grid, self.codes = config.grid, config.vocab
        given = {**(CLASS if subject.classes else TEXT), **subject.pipe.config.defaults}
        self.guidance, self.temperature = given["guidance_scale"], given["temperature"]
        self.methods = [*METHODS, *(TRAINED if drafter is not None else ())]

    def pair(self, wish: Wish, rule: str = "") -> Pair:
        """Two empty pictures."""
        plain, fast = (Canvas(at=[0.0] * self.grid**2) for _ in range(2))
        return Pair(plain, fast, wish, rule)

    def begin(self, wish: Wish, stop: threading.Event) -> tuple[Pair, str | int]:
        if not wish.prompt.strip():
            raise RefusedError("The prompt is empty. Write what to draw.")
        if len(wish.prompt) > MAX_PROMPT:
            raise RefusedError(f"The prompt has {len(wish.prompt)} characters; {MAX_PROMPT} are allowed. Shorten it.")
        within(wish, {**RANGES, "window": self.windows})
        for name, allowed in (("method", self.methods), ("rule", (LOSSLESS, *FAMILIES))):
            if getattr(wish, name) not in allowed:
                raise RefusedError(f"No {name} {getattr(wish, name)!r} here; choose from {'; '.join(allowed)}.")
        if seed_exact(wish.method) and wish.rule != LOSSLESS:
            raise RefusedError(
                f"{wish.method} draws the very picture of plain decoding, which a relaxed rule would change. Choose "
                "another method, or set the rule back to exact."
            )
        return self.pair(wish, self.rule(wish)), self.subject.label(wish.prompt.strip())

    def side(self, both: Pair, fast: bool, request: str | int, limits: Limits) -> None:
        one, painting = both.fast if fast else both.plain, self.painting(both.wish, request, fast)
        began = time.perf_counter()

        def seen(_: object, __: int, ___: int, state: dict[str, Tensor]) -> None:
            if limits.over:
                raise Ended
            one.take(self.known(state["tokens"][0]), time.perf_counter() - began)

        with contextlib.suppress(Ended):
            one.result = painting(callback_on_step_end=seen)
            one.image, one.seconds, one.state = one.result.images[0], one.result.seconds, DONE

    def rule(self, wish: Wish) -> str:
        return wish.spec(self.codes)

    def painting(self, wish: Wish, request: str | int, fast: bool) -> Callable[..., ImageResult | MarImages]:
        """The call of the pipeline as a function, which takes the callback for each forward."""
        way = PLAIN
        if fast:
            relaxed = {"rule": wish.spec(self.codes)} | ({"budget": wish.budget} if wish.budget else {})
            options = {**METHODS, **TRAINED}[wish.method] | (relaxed if wish.rule != LOSSLESS else {})
            trained = wish.method in TRAINED
            window = {} if trained else {"window": wish.window}
            way = Method(wish.method, self.drafter if trained else "jacobi", window | options)
        self.subject.go(way)
        settings = {"guidance_scale": wish.guidance, "temperature": wish.temperature}
        return partial(self.subject.paint, [request], [wish.seed], **settings)

    def known(self, tokens: Tensor) -> Sequence[bool]:
        """Which positions have tokens, given the tokens of one picture so far, which come row by row."""
        return [True] * len(tokens)

    def end(self, both: Pair, request: str | int, limits: Limits) -> Pair:
        return replace(both, over=True)

    def rest(self) -> None:
        self.subject.go(PLAIN)

    def warm_up(self, prompt: str) -> None:
        self.whole(Wish(prompt, self.usual, guidance=self.guidance))


class Studio(Easel):
    """The same for classes of a loaded MAR, exactly or by CSpD's rule.

    Attributes:
        measured: the bench's records of the quality of this model's pictures, by method.
    """

    asks = ["prompt", "method", "window", "prefill", "seed", "guidance"]
    windows = (1, MAX_AHEAD)
    usual = ITSELF
    ordered = False

    def __init__(
        self, subject: MarSubject, time_limit: float = TIME_LIMIT, measured: Mapping[str, Record] | None = None
    ) -> None:
        self.subject, self.time_limit, self.measured = subject, time_limit, measured or {}
        self.note = subject.singly()  # for both sides
        self.grid, self.temperature = subject.pipe.transformer.config.grid, None
        self.guidance = subject.settings.get("guidance_scale", subject.pipe.config.defaults.get("guidance_scale", 3.0))
        self.methods = [ITSELF, *((SMALLER, CSPD) if subject.draft is not None else ())]

    def rule(self, wish: Wish) -> str:
        return "cspd" if wish.method == CSPD else LOSSLESS

    def painting(self, wish: Wish, request: str | int, fast: bool) -> Callable[..., ImageResult | MarImages]:
        how: dict[str, object] = {"ahead": wish.window, "prefill": wish.prefill}
        how |= {} if wish.method == ITSELF else {"draft": self.subject.draft}
        how |= {"rule": "cspd"} if wish.method == CSPD else {}
        way = Method(wish.method, wish.method, how) if fast else PLAIN
        return partial(self.subject.draw, [request], [wish.seed], way, guidance_scale=wish.guidance)

    def known(self, tokens: Tensor) -> list[bool]:
        return tokens.any(1).tolist()

    def end(self, both: Pair, request: str | int, limits: Limits) -> Pair:
        """Also draw plainly in fewer passes, for comparison."""
        fewer = None
        if both.speed_up is not None and not limits.over:
            steps = max(1, self.subject.tokens // FEWER)
            settings = {"guidance_scale": both.wish.guidance, "num_inference_steps": steps}
            result = self.subject.draw([request], [both.wish.seed], PLAIN, **settings)
            fewer = result.work["passes"], result.seconds
        return replace(both, over=True, fewer=fewer)

    def rest(self) -> None:
        """Nothing to restore: each call sets its own speculation."""
