"""Training recipes: one frozen dataclass per method, every value with its source."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class EagleRecipe:
    """Online distillation of an EAGLE drafter.

    The published EAGLE-1/2 recipe (Li et al. 2024, §4.2 and its code) is 1.0 · SmoothL1 + 0.1 · soft cross-entropy on
    one step, AdamW (0.9, 0.95), lr 3e-5, features stored on disk. Ours differs where marked: the features come from the
    frozen target as training runs, and the drafter also sees its own outputs (training-time test, EAGLE-3 §3.2).
    """

    steps: int = 20000  # optimizer steps
    batch: int = 8  # sequences per step and process
    lr: float = 3e-5  # EAGLE
    warmup: float = 0.03  # share of the steps
    betas: tuple[float, float] = (0.9, 0.95)  # EAGLE
    weight_decay: float = 0.01
    clip: float = 0.5  # gradient norm; EAGLE clips values at 0.5
    muon: bool = False  # ours: Muon on matrices instead of AdamW; faster for small drafters
    feature_weight: float = 1.0  # SmoothL1 on the target's features, EAGLE
    token_weight: float = 0.1  # soft cross-entropy with the target's law, EAGLE
    unroll: int = 3  # ours, after EAGLE-3's training-time test (there 7)
    step_decay: float = 0.8  # weight of step i is step_decay^i, EAGLE-3
    noise: float = 0.0  # half-width of uniform noise on the features; EAGLE: 0.1 scaled by 512/length
    temperature: float = 1.0  # of the sampled share of the self-generated answers
    sampled: float = 0.25  # share of answers that are sampled rather than greedy
    max_new_tokens: int = 512  # of an answer; ViSpec (Kang et al. 2025, §3.3) uses 1024 with a long-answer prompt
    overlap: bool = False  # measure τ of a drawn chain, Σ min(p, q) per step, rather than of a greedy one
    held_out: int = 64  # samples kept for measuring τ
    seed: int = 0

    def with_(self, **changes: Any) -> EagleRecipe:
        """A copy with some values changed.

        Raises:
            ValueError: a name that the recipe does not have.
        """
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"unknown recipe value {unknown[0]!r}; choose from {', '.join(sorted(known))}")
        return replace(self, **changes)


# Of the embedded drafter: small enough for Muon and a high rate; the token loss leads because speed is what counts.
SCENES_EAGLE = EagleRecipe(
    steps=520, batch=12, lr=3e-3, clip=1.0, muon=True, feature_weight=0.5, token_weight=1.0, unroll=4,
    sampled=0.25, max_new_tokens=256, held_out=48,
)  # fmt: skip

# Pictures. LANTERN's recipe (Jang et al. 2024, arXiv 2410.03355, and its code) is SmoothL1 + 0.1 · cross-entropy with
# the unguided law on one step, AdamW (0.9, 0.95), lr 1e-4, batch 4, noise 0.1 · 512/length. Ours differs in that the
# target draws the pictures itself, at its own guidance scale and settings, that both streams are learnt with the guided
# law that is verified, and that the drafter also sees its own outputs, as above.
IMAGE_EAGLE = EagleRecipe(lr=1e-4, batch=4, noise=0.1, unroll=4, sampled=1.0, overlap=True)
SCENES_IMAGE_EAGLE = EagleRecipe(
    steps=220, batch=8, lr=3e-3, clip=1.0, muon=True, feature_weight=0.5, token_weight=1.0, unroll=3,
    sampled=1.0, overlap=True, held_out=24,
)  # fmt: skip

RECIPES = {
    "eagle": EagleRecipe(),
    "scenes-eagle": SCENES_EAGLE,
    "eagle-image": IMAGE_EAGLE,
    "scenes-image-eagle": SCENES_IMAGE_EAGLE,
}
