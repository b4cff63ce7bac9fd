"""The settings and statistics of speculative decoding for MAR."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.config import is_number, is_whole
from mmspec.continuous import cspd
from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.pipelines.mar.loop import MarDistribution

RULES = ("gaussian_path", "cspd")
ETA = 0.97


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted and accepted."""

    # a smaller MAR on the same VAE; None: the model itself, with its conditioning before the drafted tokens
    draft: MARTransformer2DModel | None = None
    ahead: int = 4  # tokens drafted in a round; for "cspd" iterations of the schedule, of one or several tokens each
    rule: str = "gaussian_path"  # "gaussian_path" keeps the model's distribution; "cspd", as published, does not
    # of the exact rule, in (0, 1]; a lower η accepts less, and bounds the trials after a rejection by 1/(1 − η)
    eta: float = ETA
    prefill: float = 0.0  # the share of iterations that are drawn without drafts at the beginning
    width: float = cspd.WIDTH  # of CSpD's test

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("rule", self.rule in RULES, f"one of {', '.join(RULES)}"),
            ("ahead", is_whole(self.ahead, 1), "a whole number ≥ 1"),
            ("eta", is_number(self.eta) and 0 < self.eta <= 1, "in (0, 1]"),
            ("prefill", is_number(self.prefill) and 0 <= self.prefill <= 1, "in [0, 1]"),
            ("width", is_number(self.width) and self.width > 0, "above 0"),
            ("eta", self.rule != "cspd" or self.eta == ETA, "left out, since the rule cspd has none"),
            ("width", self.rule == "cspd" or self.width == cspd.WIDTH, "left out, since only the rule cspd has it"),
        ):
            if not fine:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)!r}")
        if self.rule == "cspd" and self.draft is None:
            raise ValueError("the rule cspd needs a draft model, since it would always accept the model's own drafts")

    def check_noise(self, scheduler: MARScheduler) -> None:
        """Raise ValueError if the rule cannot test the paths of this sampler."""
        if self.rule != "cspd" and not scheduler.config.final_noise:
            raise ValueError(
                "the exact rule needs noise at every step: pipe.scheduler = "
                "MARScheduler.from_config(pipe.scheduler.config, final_noise=True, skip_terminal=True)"
            )

    def check(self, tokens: int, distribution: MarDistribution, scheduler: MARScheduler) -> None:
        """Raise ValueError, before anything is drawn, if the rule does not keep a call's distribution of L tokens."""
        self.check_noise(scheduler)
        if self.rule != "cspd" and len(distribution.turns) != tokens:
            raise ValueError(
                f"the exact rule keeps the distribution of one token per iteration; pass num_inference_steps={tokens} "
                f"(got {len(distribution.turns)}), or call disable_speculation()"
            )
        if self.rule != "cspd" and distribution.temperature == 0:
            raise ValueError("the exact rule needs noise in the steps, a temperature above 0; got 0")


@dataclass
class MarStats:
    """Statistics by the turn of a token: lists of L sums."""

    tested: list[int]  # drafts that were tested
    chance: list[float]  # the sum of their acceptance probabilities; divided by `tested`, the acceptance α
    gap: list[float]  # the sum of their log Q/P; divided by `tested`, the divergence J of the paths' distributions
    rounds: int = 0  # passes of the model in which drafts were tested
    refused: int = 0  # tokens that were rejected and drawn again
    trials: int = 0  # the number of trials for these

    def note(self, turn: int, chance: float, gap: float) -> None:
        """Add one test."""
        self.tested[turn] += 1
        self.chance[turn] += chance
        self.gap[turn] += gap

    def summary(self) -> dict[str, float]:
        """Totals over all turns: acceptance, divergence, trials after rejections, and rounds."""
        tested = max(1, sum(self.tested))
        return {
            "rounds": self.rounds, "tested": sum(self.tested), "acceptance": sum(self.chance) / tested,
            "divergence": sum(self.gap) / tested, "refused": self.refused, "trials": self.trials,
        }  # fmt: skip


def tally(tokens: int) -> MarStats:
    return MarStats([0] * tokens, [0.0] * tokens, [0.0] * tokens)
