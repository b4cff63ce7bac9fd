"""How MAR's tokens are to be drafted and tested, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.config import is_whole
from mmspec.continuous import cspd
from mmspec.models.mar import MARTransformer2DModel

RULES = ("gaussian_path", "cspd")


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted and kept."""

    # a smaller MAR on the same VAE; None: the model itself, by what it knew before the drafted tokens
    draft: MARTransformer2DModel | None = None
    ahead: int = 4  # tokens drafted in a round; for "cspd", iterations of the schedule, of one or several tokens each
    rule: str = "gaussian_path"  # "gaussian_path" keeps the model's distribution; "cspd", as published, does not
    # of the exact rule, in (0, 1]; lower keeps less and bounds the trials after a refusal by 1/(1 − η)
    eta: float = 0.97
    prefill: float = 0.0  # share of the iterations that the model draws plainly before anything is drafted
    width: float = cspd.WIDTH  # of CSpD's test

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("rule", self.rule in RULES, f"one of {', '.join(RULES)}"),
            ("ahead", is_whole(self.ahead, 1), "a whole number ≥ 1"),
            ("eta", 0 < self.eta <= 1, "in (0, 1]"),
            ("prefill", 0 <= self.prefill <= 1, "in [0, 1]"),
            ("width", self.width > 0, "above 0"),
        ):
            if not fine:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)!r}")
        if self.rule == "cspd" and self.draft is None:
            raise ValueError("the rule cspd needs a draft model; the model's own drafts would be kept always")


@dataclass
class MarStats:
    """What happened, by the turn of a token: lists of L sums."""

    tested: list[int]  # drafts that were tested
    chance: list[float]  # their chances to be kept; with `tested` the acceptance α
    gap: list[float]  # their log Q/P; with `tested` the divergence J of the paths' distributions
    rounds: int = 0  # passes of the model in which drafts were tested
    refused: int = 0  # tokens that were drawn anew
    trials: int = 0  # in how many trials

    def note(self, turn: int, chance: float, gap: float) -> None:
        """Book one test."""
        self.tested[turn] += 1
        self.chance[turn] += chance
        self.gap[turn] += gap

    def summary(self) -> dict[str, float]:
        """Over all turns: acceptance, divergence, trials after a refusal, and rounds."""
        tested = max(1, sum(self.tested))
        return {
            "rounds": self.rounds, "tested": sum(self.tested), "acceptance": sum(self.chance) / tested,
            "divergence": sum(self.gap) / tested, "refused": self.refused, "trials": self.trials,
        }  # fmt: skip


def tally(tokens: int) -> MarStats:
    return MarStats([0] * tokens, [0.0] * tokens, [0.0] * tokens)
