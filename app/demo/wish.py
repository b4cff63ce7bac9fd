"""A picture that is wished for, as the page asks it: the prompt, the method, the knob that bends the distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmspec.app.bench.image_methods import sweeps
from mmspec.app.demo.answer import MAX_PROMPT
from mmspec.app.demo.desk import MAX_SEED, RefusedError, within

MAX_WINDOW = 64
MAX_GUIDANCE = 20
LOSSLESS = "exact"
FAMILIES = tuple(sweeps(1024))  # of rules that bend the distribution, each with settings from mild to bold
STEPS = 5  # of boldness
SEED_EXACT, COUPLED = "jacobi, seed-exact", "jacobi, maximal coupling"
METHODS: dict[str, dict[str, Any]] = {  # options of the Jacobi drafter; the window comes from the page
    SEED_EXACT: {"reproducible": True},
    COUPLED: {"coupling": "maximal"},
    "jacobi, gumbel coupling": {"coupling": "gumbel"},
    "jacobi, uncoupled (SJD)": {"coupling": "none"},
    "jacobi, proactive tree (SJD-PAC)": {"coupling": "maximal", "proactive": (3, 3)},
}
TRAINED: dict[str, dict[str, Any]] = {"trained drafter": {}, "trained drafter, seed-exact": {"reproducible": True}}


def seed_exact(method: str) -> bool:
    """Whether a method draws the very tokens that plain decoding draws with the seed."""
    return bool({**METHODS, **TRAINED}[method].get("reproducible"))


@dataclass(frozen=True)
class PromptWish:
    """A picture to draw and how, as it came from the page."""

    prompt: str
    method: str = SEED_EXACT
    window: int = 16
    rule: str = LOSSLESS
    boldness: int = 1  # 1 … STEPS, of the rule
    budget: float = 0.0  # the most that the rule may be charged; 0: no limit
    seed: int = 0
    guidance: float = 3.0
    temperature: float = 1.0

    def check(self, methods: dict[str, Any]) -> None:
        """Raise RefusedError for what no run should start with."""
        if not self.prompt.strip():
            raise RefusedError("The prompt is empty. Write what to draw.")
        if len(self.prompt) > MAX_PROMPT:
            raise RefusedError(f"The prompt has {len(self.prompt)} characters; {MAX_PROMPT} are allowed. Shorten it.")
        within(self, {
            "window": (2, MAX_WINDOW), "boldness": (1, STEPS), "budget": (0, 1000), "seed": (0, MAX_SEED),
            "guidance": (1, MAX_GUIDANCE), "temperature": (0, 2),
        })  # fmt: skip
        for name, allowed in (("method", methods), ("rule", (LOSSLESS, *FAMILIES))):
            if getattr(self, name) not in allowed:
                raise RefusedError(f"No {name} {getattr(self, name)!r} here; choose from {', '.join(allowed)}.")
        if self.seed_exact and self.rule != LOSSLESS:
            raise RefusedError(
                f"{self.method} draws plain decoding's own picture, which a relaxed rule would change. Choose another "
                "method, or set the rule back to exact."
            )

    @property
    def seed_exact(self) -> bool:
        return seed_exact(self.method)

    @property
    def same(self) -> bool:
        """Whether the accelerated picture has to be the plain one."""
        return self.seed_exact or self.temperature == 0

    def spec(self, codes: int) -> str:
        """The rule as `enable` takes it."""
        if self.rule == LOSSLESS:
            return "exact"
        points = sweeps(codes)[self.rule]
        return points[min(self.boldness, len(points)) - 1][1]
