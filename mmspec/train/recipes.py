"""Training recipes: how a drafter is distilled, as data; one per method as published, every value with its source."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Stage:
    """A stretch of a run.

    Attributes:
        share: of the recipe's steps.
        pictures: chance that a batch has pictures rather than text alone, at the beginning and at the end.
        restart: the rate warms up and decays within this stage, rather than over the whole run.
        frozen: parameters whose names begin so stay as they are.
        changes: values of the recipe that are others in this stage, by name.
    """

    share: float = 1.0
    pictures: tuple[float, float] = (1.0, 1.0)
    restart: bool = False
    frozen: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """Online distillation of a drafter from a frozen target; the defaults are those of EAGLE.

    The published EAGLE-1/2 recipe (Li et al. 2024, §4.2 and its code) is 1.0 · SmoothL1 + 0.1 · soft cross-entropy on
    one step, AdamW (0.9, 0.95), lr 3e-5, features stored on disk. Ours differs where marked: the features come from the
    frozen target as training runs, and the drafter also sees its own outputs (training-time test, EAGLE-3 §3.2).
    """

    steps: int = 20000  # optimizer steps; ours, in the place of epochs over a data set of a known size
    batch: int = 8  # sequences per step and process
    lr: float = 3e-5  # EAGLE
    warmup: float = 0.03  # share of the steps; ours (EAGLE: 2000 of 800 000)
    floor: float = 0.01  # share of `lr` that the linear decay ends at; ours
    betas: tuple[float, float] = (0.9, 0.95)  # EAGLE
    weight_decay: float = 0.01
    clip: float = 0.5  # EAGLE
    clip_by: str = "norm"  # of the gradient, or "value"; ours (EAGLE: value)
    muon: bool = False  # ours: Muon on matrices instead of AdamW; faster for small drafters
    feature_weight: float = 1.0  # SmoothL1 on the target's features, EAGLE
    token_weight: float = 0.1  # soft cross-entropy with the target's distribution, EAGLE
    law_weight: float = 0.0  # Σ |q − p|, ViSpec
    rank_weight: float = 0.0  # ListMLE of the target's likeliest tokens, ViSpec
    ranked: int = 10  # how many these are, ViSpec
    unroll: int = 3  # ours, after EAGLE-3's training-time test (there 7); of a drafter with K heads, so many of them
    step_decay: float = 0.8  # weight of step i is step_decay^i, EAGLE-3
    anchors: int = 0  # positions of a text that are learnt from in a step, drawn anew in each, DFlash; 0: all
    confidence_weight: float = 0.0  # how likely a draft is to stand, foretold by a confidence head, DSpark
    rollouts: int = 0  # further passes on the drafter's own predictions in the place of the target's features, ViSpec
    noise: float = 0.0  # half-width of uniform noise on the features, times 512 / length; EAGLE: 0.1
    temperature: float = 1.0  # of the sampled share of the self-generated answers
    sampled: float = 0.25  # share of answers that are sampled rather than greedy
    max_new_tokens: int = 512  # of an answer
    vocabulary: int = 0  # most frequent tokens of the answers, which alone are learnt and proposed, FR-Spec; 0: all
    writing: int = 16  # answers that are written at a time
    suffix: str = ""  # said after every question about pictures
    overlap: bool = False  # measure τ of a drawn chain, Σ min(p, q) per step, rather than of a greedy one
    gate_learns: str = "after"  # all else, if a drafter has a gate that chooses; ours. "along" with the rest, SpecVLM
    gate_heat: tuple[float, float] = (1.0, 0.5)  # temperature of what it then draws, from first to last step; ours
    gate_cost: float = 0.01  # what keeping all visual rows adds to a loss, if the gate learns after all else; ours
    gate_samples: int = 200  # that the gate learns from, after all else; ours
    gate_steps: int = 100  # of its own optimizer over all of these; ours
    bf16: bool = False  # traces and losses in bfloat16 where torch's autocast says so; weights keep their dtype
    held_out: int = 64  # samples kept for measuring τ
    seed: int = 0
    stages: tuple[Stage, ...] = (Stage(),)

    def __post_init__(self) -> None:
        known = {f.name for f in fields(self)}
        unknown = sorted({name for stage in self.stages for name in stage.changes} - known)
        if unknown:
            raise ValueError(f"a stage changes {unknown[0]!r}, which recipes do not have; {sorted(known)}")
        if self.clip_by not in ("norm", "value"):
            raise ValueError(f"clip_by is 'norm' or 'value'; got {self.clip_by!r}")
        if self.gate_learns not in ("after", "along"):
            raise ValueError(f"gate_learns is 'after' or 'along'; got {self.gate_learns!r}")
        if min(self.gate_heat) <= 0:
            raise ValueError(f"gate_heat is two temperatures above 0; got {self.gate_heat!r}")
        if abs(sum(stage.share for stage in self.stages) - 1.0) > 1e-6:
            raise ValueError(f"the shares of the stages must add up to 1; got {[s.share for s in self.stages]}")

    def with_(self, **changes: Any) -> Recipe:
        """A copy with some values changed, in all stages.

        Raises:
            ValueError: a name that the recipe does not have.
        """
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"unknown recipe value {unknown[0]!r}; choose from {', '.join(sorted(known))}")
        stages = changes.get("stages", self.stages)
        kept = tuple(
            replace(stage, changes={k: v for k, v in stage.changes.items() if k not in changes}) for stage in stages
        )
        return replace(self, **{**changes, "stages": kept})

    def stage(self, step: int) -> tuple[Stage, int, int]:
        """The stage that a step falls in, its first step, and the step after its last."""
        first, passed = 0, 0.0
        for stage in self.stages:
            passed += stage.share
            after = round(passed * self.steps)
            if step < after or stage is self.stages[-1]:
                break
            first = after
        return stage, first, after

    def at(self, step: int) -> Recipe:
        """The recipe as it holds at a step."""
        changes = self.stage(step)[0].changes
        return replace(self, **changes) if changes else self

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then linear decay to `floor`."""
        stage, first, after = self.stage(step)
        first, after = (first, after) if stage.restart else (0, self.steps)
        done = (step + 1 - first) / (after - first)
        return self.lr * min(1.0, done / max(self.warmup, 1e-9)) * max(1.0 - done, self.floor)

    def pictures(self, step: int) -> float:
        """Chance that the batch of a step has pictures."""
        stage, first, after = self.stage(step)
        begin, end = stage.pictures
        return begin + (end - begin) * (step + 1 - first) / (after - first)

    def heat(self, step: int) -> float | None:
        """Temperature of the draws that a gate learns from in a step; None: it learns after all else."""
        begin, end = self.gate_heat
        return begin + (end - begin) * (step + 1) / self.steps if self.gate_learns == "along" else None

    @property
    def texts(self) -> bool:
        """Whether it needs prompts without pictures."""
        return any(min(stage.pictures) < 1 for stage in self.stages)

    def without_texts(self) -> Recipe:
        """The same without text: stages that have nothing else fall away, the others keep their proportions."""
        stages = [stage for stage in self.stages if max(stage.pictures) > 0]
        whole = sum(stage.share for stage in stages)
        return replace(
            self, stages=tuple(replace(stage, share=stage.share / whole, pictures=(1.0, 1.0)) for stage in stages)
        )


EAGLE = Recipe()

# ViSpec (Kang et al. 2025, arXiv 2509.15235, and its code): AdamW at 3e-6 with one of twenty epochs of warm-up in
# either stage; first plain EAGLE on text, with the order of ten tokens as a further loss, then the adaptor on pictures:
# ten times the distance of the distributions plus the order, no features, and a second pass on its own predictions,
# which keeps it from leaning on the target's features (one pass more, `mtp-steps 1`). The target's answers are greedy,
# and long because they are asked to be. Ours: the batch (there one per GPU, of an unknown number), steps, noise in the
# second stage as in the first, self-written answers in the first stage too (there ShareGPT's own).
VISPEC = Recipe(
    lr=3e-6, warmup=0.05, clip=0.5, clip_by="value", noise=0.1, unroll=1, sampled=0.0, max_new_tokens=1024,
    suffix="Please answer with at least 1000 words.",
    stages=(
        Stage(
            0.5, (0.0, 0.0), restart=True, frozen=("img_fc", "adaptor"),
            changes={"feature_weight": 1.0, "token_weight": 0.1, "rank_weight": 0.01},
        ),
        Stage(
            0.5, restart=True,
            changes={
                "feature_weight": 0.0, "token_weight": 0.0, "law_weight": 10.0, "rank_weight": 0.1, "rollouts": 1,
            },
        ),
    ),
)  # fmt: skip

# MSD (arXiv 2505.14260 and its code): EAGLE's losses, AdamW at 5e-5, warm-up 2000 of 800 000 steps,
# norm clipped at 0.5; twenty epochs of text, then twenty in which the share of samples with pictures rises to 1. Ours:
# a batch is of one kind, so that little of it is padding; the answers are the target's own (there the data sets').
MSD = Recipe(
    batch=4, lr=5e-5, warmup=2000 / 800000, noise=0.1, unroll=1,
    stages=(Stage(0.5, (0.0, 0.0)), Stage(0.5, (0.0, 1.0))),
)  # fmt: skip

# FLASH (arXiv 2505.12728 and its code): EAGLE's losses with the targets of all K = 5 heads counting the same, AdamW at
# 3e-5 (2e-5 for Qwen2.5-VL), warm-up 2000 of 800 000, values clipped at 0.5, noise; of clips the target writes at most
# 200 tokens, greedily. Ours: so for pictures too (there the data set's answers).
FLASH = Recipe(
    batch=2, lr=3e-5, warmup=2000 / 800000, clip_by="value", noise=0.1, unroll=5, step_decay=1.0, sampled=0.0,
    max_new_tokens=200,
)  # fmt: skip

# SpecVLM (Huang et al. 2025, arXiv 2509.11815): online-logit distillation with EAGLE's losses, AdamW at 8e-5 (7B; 5e-5
# for 13B) without warm-up or weight decay, batches of 128, one stage. Ours: the decay to a tenth, the clip, the
# target's own answers (there the data sets'), and that the gate learns after the compressors, unless `gate_learns`.
SPECVLM = Recipe(batch=128, lr=8e-5, warmup=0.0, floor=0.1, weight_decay=0.0, unroll=1)

# DFlash (2026, arXiv 2602.06036, and z-lab's code): tokens alone, weighed exp(−(k − 1)/γ) at row k of a block of 16,
# γ = 7; AdamW at 6e-4, warm-up 0.04, clip 1.0, 512 anchors a text. Ours: the cross-entropy is with the target's
# distribution (there with the tokens of its answers), and the decay is linear (there a cosine).
DFLASH = Recipe(
    lr=6e-4, warmup=0.04, floor=0.0, clip=1.0, feature_weight=0.0, token_weight=1.0, unroll=15, anchors=512,
    step_decay=0.8669,
)  # fmt: skip

# DSpark, as speculators trains it: the same with γ = 4 on a block of 8 that drafts at the anchor, too, and a confidence
# head that learns Σ min(p, q), weighed alike.
DSPARK = DFLASH.with_(unroll=8, step_decay=0.7788, confidence_weight=1.0)

# Multi-token prediction: the losses of DeepSeek-V3 (2024, arXiv 2412.19437, §2.2) and of those who train such heads on
# after the model: tokens alone. Ours: the distribution of the target in the place of the text's tokens, one head
# unrolled over as many steps as it drafts, AdamW at 1e-4.
MTP = Recipe(lr=1e-4, batch=8, clip=1.0, feature_weight=0.0, token_weight=1.0, unroll=4)

# Of the embedded drafters: small enough for Muon and a high rate; the token loss leads because speed is what counts.
SCENES_EAGLE = Recipe(
    steps=1000, batch=12, lr=3e-3, clip=1.0, muon=True, feature_weight=0.5, token_weight=1.0, unroll=5,
    sampled=0.25, max_new_tokens=256, held_out=48,
)  # fmt: skip

SCENES_MTP = SCENES_EAGLE.with_(steps=800, feature_weight=0.2, unroll=6)

# Of the drafters of `scenes-video`, which see the same prompts and the target's same answers, 1,000 times 12 of them.
# Losses, unroll and rates are EAGLE's for all, so that the methods differ in nothing else; FLASH learns its six heads
# in one pass, a block its rows.
SCENES_VIDEO = {
    "scenes-video-eagle": SCENES_EAGLE,
    "scenes-video-msd": SCENES_EAGLE,
    "scenes-video-vispec": SCENES_EAGLE,
    "scenes-video-flash": SCENES_EAGLE.with_(unroll=6),
    "scenes-video-specvlm": SCENES_EAGLE,
    "scenes-video-block": SCENES_EAGLE.with_(lr=6e-3, feature_weight=0.0, unroll=8, step_decay=0.95, anchors=32),
}

# Pictures. LANTERN's recipe (Jang et al. 2024, arXiv 2410.03355, and its code) is SmoothL1 + 0.1 · cross-entropy with
# the unguided distribution on one step, AdamW (0.9, 0.95), lr 1e-4, batch 4, noise 0.1 · 512/length. Ours differs in
# that the target draws the pictures itself, at its own guidance scale and settings, that both streams are learnt with
# the guided distribution that is verified, and that the drafter also sees its own outputs, as above.
IMAGE_EAGLE = Recipe(lr=1e-4, batch=4, noise=0.1, unroll=4, sampled=1.0, overlap=True)
# For `scenes-llamagen`: small enough for Muon and a high rate; what counts is the guided distribution of a token.
SCENES_IMAGE_EAGLE = IMAGE_EAGLE.with_(
    steps=1500, batch=8, lr=1e-3, muon=True, noise=0.0, unroll=3, feature_weight=0.2, token_weight=1.0, writing=32,
    held_out=16,
)  # fmt: skip
# A batch is of rounds here, each with all positions of a window; `writing` pictures are drawn at a time.
IMAGE_HEADS = Recipe(
    steps=2400, batch=96, lr=1e-3, betas=(0.9, 0.999), clip=1.0, feature_weight=0.0, law_weight=1.0, writing=8,
    unroll=1, sampled=1.0, held_out=24,
)  # fmt: skip

RECIPES = {
    "eagle": EAGLE,
    "vispec": VISPEC,
    "msd": MSD,
    "flash": FLASH,
    "specvlm": SPECVLM,
    "block": DFLASH,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "mtp": MTP,
    "scenes-eagle": SCENES_EAGLE,
    "scenes-mtp": SCENES_MTP,
    **SCENES_VIDEO,
    "eagle-image": IMAGE_EAGLE,
    "scenes-eagle-image": SCENES_IMAGE_EAGLE,
    "heads-image": IMAGE_HEADS,
}
