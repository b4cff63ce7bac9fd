"""Training recipes of drafters as data: one per published method, each value with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    Attributes:
        share: share of the recipe's steps.
        pictures: probability that a batch has pictures rather than only text, at the stage's beginning and end.
        restart: the learning rate warms up and decays within this stage, not over the whole run.
        frozen: prefixes of the names of parameters that are not trained.
        changes: values of the recipe that differ in this stage, by name.
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
    one step, AdamW (0.9, 0.95), lr 3e-5, features stored on disk. Ours differs where marked: the features are computed
    by the frozen target during training, and the drafter also sees its own outputs (training-time test, EAGLE-3 §3.2).
    """

    steps: int = 20000  # optimizer steps; ours, instead of epochs over a data set of known size
    batch: int = 8  # sequences per step and process
    lr: float = 3e-5  # EAGLE
    warmup: float = 0.03  # share of the steps; ours (EAGLE: 2000 of 800 000)
    floor: float = 0.01  # share of `lr` at the end of the linear decay; ours
    betas: tuple[float, float] = (0.9, 0.95)  # EAGLE
    weight_decay: float = 0.01
    clip: float = 0.5  # EAGLE
    clip_by: str = "norm"  # clip the gradient's "norm" or its "value"; ours (EAGLE: value)
    muon: bool = False  # ours: Muon on matrices instead of AdamW; faster for small drafters
    feature_weight: float = 1.0  # SmoothL1 on the target's features, EAGLE
    token_weight: float = 0.1  # soft cross-entropy with the target's distribution, EAGLE
    law_weight: float = 0.0  # Σ |q − p|, ViSpec
    rank_weight: float = 0.0  # ListMLE of the target's likeliest tokens, ViSpec
    ranked: int = 10  # number of these tokens, ViSpec
    unroll: int = 3  # ours, after EAGLE-3's training-time test (there 7); for a drafter with K heads, the heads used
    step_decay: float = 0.8  # weight of step i is step_decay^i, EAGLE-3
    anchors: int = 0  # random positions of a text that are used in a step, DFlash; 0: all
    confidence_weight: float = 0.0  # of the confidence head's acceptance probability, DSpark
    rollouts: int = 0  # further passes on the drafter's own predictions instead of the target's features, ViSpec
    noise: float = 0.0  # half-width of uniform noise on the features, times 512 / length; EAGLE: 0.1
    temperature: float = 1.0  # of the sampled share of the self-generated answers
    sampled: float = 0.25  # share of answers that are sampled rather than greedy
    max_new_tokens: int = 512  # of an answer
    vocabulary: int = 0  # learn and propose only so many most frequent tokens of the answers, FR-Spec; 0: all
    writing: int = 16  # answers that are generated at a time
    suffix: str = ""  # appended to every question about pictures
    overlap: bool = False  # measure τ of a drawn chain, Σ min(p, q) per step, rather than of a greedy one
    gate_learns: str = "after"  # a selecting gate is trained "after" the rest (ours), or "along" with it (SpecVLM)
    gate_heat: tuple[float, float] = (1.0, 0.5)  # temperature of its draws with "along", first to last step; ours
    gate_cost: float = 0.01  # cost of keeping all visual rows, added to a loss, with "after"; ours
    gate_samples: int = 200  # samples for the gate's training with "after"; ours
    gate_steps: int = 100  # optimizer steps over all these samples; ours
    bf16: bool = False  # traces and losses under bfloat16 autocast; weights keep their dtype
    held_out: int = 64  # samples for measuring τ
    seed: int = 0
    stages: tuple[Stage, ...] = (Stage(),)

    def __post_init__(self) -> None:
        names = {f.name for f in fields(self)}
        unknown = sorted({name for stage in self.stages for name in stage.changes} - names)
        if unknown:
            raise ValueError(f"a stage changes {unknown[0]!r}, which recipes do not have; choose from {sorted(names)}")
        for name in ("batch", "unroll", "max_new_tokens", "writing", "held_out", "gate_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("betas", "gate_heat"):
            pair = getattr(self, name)
            if len(pair) != 2 or not all(isinstance(one, int | float) for one in pair):
                raise ValueError(f"{name} must be two numbers; got {pair!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is two numbers from 0 to below 1; got {self.betas!r}")
        weights = [name for name in names if name.endswith("_weight")]
        for stage in self.stages:
            values = [{**vars(self), **stage.changes}[name] for name in weights]
            if not all(0 <= value < math.inf for value in values):
                raise ValueError(f"weights of losses are finite, and not below 0; got {values}")
            if not any(values):
                raise ValueError(f"nothing is left to learn: {', '.join(sorted(weights))} are all 0")
        if self.clip_by not in ("norm", "value"):
            raise ValueError(f"clip_by is 'norm' or 'value'; got {self.clip_by!r}")
        if self.gate_learns not in ("after", "along"):
            raise ValueError(f"gate_learns is 'after' or 'along'; got {self.gate_learns!r}")
        if min(self.gate_heat) <= 0:
            raise ValueError(f"gate_heat is two temperatures above 0; got {self.gate_heat!r}")
        if abs(sum(stage.share for stage in self.stages) - 1.0) > 1e-6:
            raise ValueError(f"the shares of the stages must add up to 1; got {[s.share for s in self.stages]}")

    def with_(self, **changes: Any) -> Recipe:
        """A copy with some values changed, in all stages. Raises ValueError: a name that the recipe does not have."""
        names = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - names)
        if unknown:
            raise ValueError(f"unknown recipe value {unknown[0]!r}; choose from {', '.join(sorted(names))}")
        stages = changes.get("stages", self.stages)
        kept = tuple(
            replace(stage, changes={k: v for k, v in stage.changes.items() if k not in changes}) for stage in stages
        )
        return replace(self, **{**changes, "stages": kept})

    def stage(self, step: int) -> tuple[Stage, int, int]:
        """The stage of a step, the stage's first step, and the step after its last."""
        first, passed = 0, 0.0
        for stage in self.stages:
            passed += stage.share
            after = round(passed * self.steps)
            if step < after or stage is self.stages[-1]:
                break
            first = after
        return stage, first, after

    def at(self, step: int) -> Recipe:
        """The recipe with the changes of a step's stage."""
        changes = self.stage(step)[0].changes
        return replace(self, **changes) if changes else self

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then linear decay to `floor`."""
        stage, first, after = self.stage(step)
        first, after = (first, after) if stage.restart else (0, self.steps)
        done = (step + 1 - first) / (after - first)
        return self.lr * min(1.0, done / max(self.warmup, 1e-9)) * max(1.0 - done, self.floor)

    def pictures(self, step: int) -> float:
        """The probability that the batch of a step has pictures."""
        stage, first, after = self.stage(step)
        begin, end = stage.pictures
        return begin + (end - begin) * (step + 1 - first) / (after - first)

    def heat(self, step: int) -> float | None:
        """The temperature of a gate's draws in a step; None: the gate is trained after the rest."""
        begin, end = self.gate_heat
        return begin + (end - begin) * (step + 1) / self.steps if self.gate_learns == "along" else None

    @property
    def texts(self) -> bool:
        """Whether it needs prompts without pictures."""
        return any(min(stage.pictures) < 1 for stage in self.stages)

    def without_texts(self) -> Recipe:
        """The recipe without text: stages of text only are removed, the others keep their proportions."""
        stages = [stage for stage in self.stages if max(stage.pictures) > 0]
        whole = sum(stage.share for stage in stages)
        return replace(
            self, stages=tuple(replace(stage, share=stage.share / whole, pictures=(1.0, 1.0)) for stage in stages)
        )


EAGLE = Recipe()

# ViSpec (Kang et al. 2025, arXiv 2509.15235, and its code): AdamW at 3e-6 with one of twenty epochs of warm-up in
# each stage; first plain EAGLE on text, with the ranking of ten tokens as a further loss, then the adaptor on pictures:
# ten times the distance of the distributions plus the ranking, no feature loss, and one more pass on its own
# predictions (`mtp-steps 1`), so that it does not rely on the target's features. The target's answers are greedy, and
# long because the prompt requests it. Ours: the batch (there one per GPU, of an unknown number), steps, noise in the
# second stage as in the first, self-generated answers in the first stage too (there ShareGPT's own).
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
# batches do not mix text and pictures, to avoid padding; the answers are the target's own (there the data sets').
MSD = Recipe(
    batch=4, lr=5e-5, warmup=2000 / 800000, noise=0.1, unroll=1,
    stages=(Stage(0.5, (0.0, 0.0)), Stage(0.5, (0.0, 1.0))),
)  # fmt: skip

# FLASH (arXiv 2505.12728 and its code): EAGLE's losses with equal weights for all K = 5 heads, AdamW at 3e-5 (2e-5 for
# Qwen2.5-VL), warm-up 2000 of 800 000, values clipped at 0.5, noise; for videos the target generates at most 200
# tokens, greedily. Ours: the same for pictures (there the data set's answers).
FLASH = Recipe(
    batch=2, lr=3e-5, warmup=2000 / 800000, clip_by="value", noise=0.1, unroll=5, step_decay=1.0, sampled=0.0,
    max_new_tokens=200,
)  # fmt: skip

# SpecVLM (Huang et al. 2025, arXiv 2509.11815): online-logit distillation with EAGLE's losses, AdamW at 8e-5 (7B; 5e-5
# for 13B) without warm-up or weight decay, batches of 128, one stage. Ours: the decay to a tenth, the clip, the
# target's own answers (there the data sets'), and the gate's training after the compressors (see `gate_learns`).
SPECVLM = Recipe(batch=128, lr=8e-5, warmup=0.0, floor=0.1, weight_decay=0.0, unroll=1)

# DFlash (2026, arXiv 2602.06036, and z-lab's code): only a token loss, exp(−(k − 1)/γ) at row k of a block of 16,
# γ = 7; AdamW at 6e-4, warm-up 0.04, clip 1.0, 512 anchors a text. Ours: the cross-entropy is with the target's
# distribution (there with the tokens of its answers), and the decay is linear (there a cosine).
DFLASH = Recipe(
    lr=6e-4, warmup=0.04, floor=0.0, clip=1.0, feature_weight=0.0, token_weight=1.0, unroll=15, anchors=512,
    step_decay=0.8669,
)  # fmt: skip

# DSpark, as speculators trains it: the same with γ = 4 on a block of 8 that drafts at the anchor, too, and a confidence
# head that learns Σ min(p, q), with the same weights.
DSPARK = DFLASH.with_(unroll=8, step_decay=0.7788, confidence_weight=1.0)

# Multi-token prediction: the losses of DeepSeek-V3 (2024, arXiv 2412.19437, §2.2) and of later training of such heads:
# only token losses. Ours: the target's distribution instead of the text's tokens, one head unrolled over as many steps
# as it drafts, AdamW at 1e-4.
MTP = Recipe(lr=1e-4, batch=8, clip=1.0, feature_weight=0.0, token_weight=1.0, unroll=4)

# For the embedded drafters: small enough for Muon and a high rate; the token loss, which sets the speed, weighs most.
SCENES_EAGLE = Recipe(
    steps=1000, batch=12, lr=3e-3, clip=1.0, muon=True, feature_weight=0.5, token_weight=1.0, unroll=5,
    sampled=0.25, max_new_tokens=256, held_out=48,
)  # fmt: skip

SCENES_MTP = SCENES_EAGLE.with_(steps=800, feature_weight=0.2, unroll=6)

# For the drafters of `scenes-video`, which are trained on the same prompts and answers, 1,000 batches of 12. Losses,
# unroll and rates are EAGLE's for all, so that only the methods differ; FLASH trains its six heads in one pass, a block
# drafter its rows.
SCENES_VIDEO = {
    "scenes-video-eagle": SCENES_EAGLE,
    "scenes-video-msd": SCENES_EAGLE,
    "scenes-video-vispec": SCENES_EAGLE,
    "scenes-video-flash": SCENES_EAGLE.with_(unroll=6),
    "scenes-video-specvlm": SCENES_EAGLE,
    "scenes-video-block": SCENES_EAGLE.with_(lr=6e-3, feature_weight=0.0, unroll=8, step_decay=0.95, anchors=32),
}

# Pictures. LANTERN's recipe (Jang et al. 2024, arXiv 2410.03355, and its code) is SmoothL1 + 0.1 · cross-entropy with
# the unguided distribution on one step, AdamW (0.9, 0.95), lr 1e-4, batch 4, noise 0.1 · 512/length. Ours: the target
# generates the pictures itself, at its own guidance scale and settings; both streams are trained towards the guided
# distribution, which is the one that is verified; and the drafter also sees its own outputs, as above.
IMAGE_EAGLE = Recipe(lr=1e-4, batch=4, noise=0.1, unroll=4, sampled=1.0, overlap=True)
# For `scenes-llamagen`: small enough for Muon and a high rate; the loss on the guided distribution has the most weight.
SCENES_IMAGE_EAGLE = IMAGE_EAGLE.with_(
    steps=1500, batch=8, lr=1e-3, muon=True, noise=0.0, unroll=3, feature_weight=0.2, token_weight=1.0, writing=32,
    held_out=16,
)  # fmt: skip
# Here a batch consists of rounds, each with all positions of a window; `writing` pictures are generated at a time.
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
