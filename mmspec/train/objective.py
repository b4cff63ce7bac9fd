"""Training losses of drafters, as in the published recipes, and the share of tokens that they predict."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.feature import FeatureDrafter
from mmspec.protocols import Target
from mmspec.train.recipes import Recipe
from mmspec.train.trace import Teaches, Trace

Learner = FeatureDrafter | BlockDrafter
LARGE = 2**28  # probabilities of all steps together; 1 GiB, and several times that for the gradient


def cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """−Σ p log q [rows] of logits [rows, V] of q (EAGLE, §4.2)."""
    return -(p * logits.log_softmax(-1)).sum(-1)


def law_distance(logits: Tensor, p: Tensor) -> Tensor:
    """Σ |q − p| [rows], twice the total variation (ViSpec's code)."""
    return (logits.softmax(-1) - p).abs().sum(-1)


def list_mle(logits: Tensor, p: Tensor, ranked: int) -> Tensor:
    """ListMLE [rows]: minus the log-probability that q ranks p's `ranked` top tokens like p (ViSpec's code; Xia 2008).

    That is −Σ_i (s_i − log Σ_{m ≥ i} exp s_m) over the logits s of these tokens.
    """
    s = logits.gather(-1, p.topk(min(ranked, p.shape[-1]), -1).indices)
    rest = s.flip(-1).logcumsumexp(-1).flip(-1)
    return (rest - s).sum(-1)


def losses(
    drafter: Learner, network: nn.Module, teacher: Teaches, trace: Trace, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """The weighted loss of all unrolled steps and rollouts, and the agreement of each step's token with the target's.

    Row j pairs the embedding at j + 1 with the features at j and predicts the feature at j + 1, hence token j + 2. A
    row counts for a step if this token and those of the steps before are the target's own.

    Returns:
        The loss (a scalar), and agreement [steps, rows] over the rows that count for every step: whether the likeliest
        tokens are the same (bool), or with the recipe's `overlap` Σ min(p, q).
    """
    T = trace.ids.shape[1] - 1
    assert recipe.unroll <= T, "a sequence shorter than the unrolled steps"
    features = trace.features[:, :-1]
    if recipe.noise:
        half = recipe.noise * 512 / trace.valid.sum(1)[:, None, None]
        features = features + (torch.rand_like(features) * 2 - 1) * half

    # A rollout reads the predictions at all rows; without rollouts only some rows are needed.
    rows = None if recipe.rollouts else F.pad(trace.answered[:, 2:], (0, 1))
    rows = rows if rows is None or not recipe.anchors else _anchors(rows, recipe.anchors, network.training)
    more = {}
    if drafter.masked:
        more["mask"] = teacher.embed(trace.ids.new_tensor([drafter.config.mask_token]))[0]
    if drafter.positioned:
        more["positions"] = trace.positions[:, :-1]

    def run(features: Tensor) -> list[Tensor]:
        read = trace.embeds[:, 1:], features, trace.visual[:, 1:], trace.valid[:, :-1]
        return network(*read, recipe.unroll, trace.start, rows, **more)

    outputs = run(features)
    total, agree = _compared(drafter, teacher, trace, outputs, recipe, rows)
    for _ in range(recipe.rollouts):
        outputs = run(_own(features, outputs[0]))
        total = total + _compared(drafter, teacher, trace, outputs, recipe)[0]
    return total, agree


def _anchors(rows: Tensor, count: int, drawn: bool) -> Tensor:
    """At most `count` of each text's rows, bool [B, T]: drawn at random, or spread by the golden ratio."""
    spread = torch.arange(rows.shape[1], device=rows.device) * 0.618034 % 1
    score = torch.where(rows, torch.rand(rows.shape, device=rows.device) if drawn else spread, -1.0)
    return rows & (score >= score.topk(min(count, rows.shape[1]), -1).values[:, -1:])


def _own(features: Tensor, predicted: Tensor) -> Tensor:
    """The features of a rollout: at row j the prediction of row j − 1, if there is one; else the target's feature."""
    if features.shape != predicted.shape:
        raise ValueError("rollouts need a drafter that reads only the target's final feature, which it predicts")
    before = F.pad(predicted[:, :-1], (0, 0, 1, 0))
    return torch.where((before != 0).any(-1, keepdim=True), before, features)


def _compared(
    drafter: Learner, teacher: Teaches, trace: Trace, outputs: list[Tensor], recipe: Recipe, only: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and agreement of the predictions of one pass, at all rows or `only` some, bool [B, T]."""
    wanted = trace.final[:, 1:]
    token_after = F.pad(trace.answered[:, 2:], (0, 1))
    counts = [token_after if only is None else only]
    for i in range(1, len(outputs)):
        counts.append(counts[-1] & F.pad(token_after[:, i:], (0, i)))
    needed = torch.stack([rows.roll(step, 1) for step, rows in enumerate(counts)]).any(0)  # no row that counts wraps
    best, law, contained, among = _aims(drafter, teacher, wanted[needed], recipe)  # once for all steps
    place = needed.flatten().cumsum(0).view_as(needed) - 1

    def judged(step: int, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a step's predictions z [rows, H], and their agreement [rows]."""
        at = place.roll(-step, 1)[rows]
        p, weight = law[at], contained[at]
        before = trace.ids[:, 1:].roll(-step, 1)[rows]  # the token before the predicted one
        logits = _logits(drafter, teacher, z, before)
        drafted = drafter.head.to_target(logits.argmax(-1))
        each = _weighted(logits, p, recipe)
        if recipe.feature_weight and z.shape[-1] == wanted.shape[-1]:
            h = wanted.roll(-step, 1)[rows]
            each = each + recipe.feature_weight * F.smooth_l1_loss(z, h, reduction="none").mean(-1)
        if recipe.confidence_weight:
            each = each + recipe.confidence_weight * _doubt(drafter, z, before, p, logits)
        same = drafted == best[at]
        if among is not None:
            same = torch.minimum(among[at], logits.detach().softmax(-1)).sum(-1)
        return recipe.step_decay**step * (each * weight).sum() / weight.sum().clamp(min=1), same

    # What has the width of the vocabulary is in memory of one step at a time, if that of all is large.
    once = partial(checkpoint, judged, use_reentrant=False) if law.numel() * len(outputs) > LARGE else judged
    total, agree = wanted.new_zeros(()), []
    for step, (predicted, rows) in enumerate(zip(outputs, counts, strict=True)):
        loss, same = once(step, predicted[rows], rows)
        total = total + loss
        agree.append(same[counts[-1][rows]])
    return total, torch.stack(agree)


@torch.no_grad()
def _aims(
    drafter: Learner, teacher: Teaches, final: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the target's features [rows, H] ask for: its likeliest tokens; p among the draft vocabulary; whether that
    contains the token, 1 or 0 (where it does not, nothing is learnt: EAGLE-3's code); and with the recipe's `overlap`
    the probabilities of the draft vocabulary's tokens among all."""
    full = teacher.head(final).float()
    best, target = full.argmax(-1), drafter.head.to_draft(full)
    contained = (drafter.head.to_target(target.argmax(-1)) == best).float()
    return best, target.softmax(-1), contained, drafter.head.to_draft(full.softmax(-1)) if recipe.overlap else None


def _logits(drafter: Learner, teacher: Teaches, z: Tensor, before: Tensor) -> Tensor:
    """Logits [rows, V_d]; if they depend on the token before, it is the target's own."""
    logits = drafter.logits(z, cast(Target, teacher)).float()  # uses only the head of the target
    if not (isinstance(drafter, BlockDrafter) and drafter.config.sequential):
        return logits
    return drafter.after(logits[:, None], z[:, None], before[:, None])[0][:, 0]


def _doubt(drafter: Learner, z: Tensor, before: Tensor, p: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy [rows] of the confidence head with the acceptance probability, Σ min(p, q) (DSpark)."""
    chance = torch.minimum(p, logits.detach().softmax(-1)).sum(-1).clamp(0, 1)
    assert isinstance(drafter, BlockDrafter), "it has a confidence head"
    return F.binary_cross_entropy(drafter.trust(z, before).float(), chance, reduction="none")


def _weighted(logits: Tensor, p: Tensor, recipe: Recipe) -> Tensor:
    """The weighted sum of the losses on distributions [rows]."""
    each = logits.new_zeros(len(logits))
    if recipe.token_weight:
        each = each + recipe.token_weight * cross_entropy(logits, p)
    if recipe.law_weight:
        each = each + recipe.law_weight * law_distance(logits, p)
    if recipe.rank_weight:
        each = each + recipe.rank_weight * list_mle(logits, p, recipe.ranked)
    return each


def expected_tokens(agree: Tensor) -> float:
    """τ of a greedy or drawn chain of `unroll` tokens, bonus included: 1 + Σ_d P(the first d tokens are accepted)."""
    return 1.0 + agree.float().cumprod(0).mean(1).sum().item() if agree.numel() else 1.0
