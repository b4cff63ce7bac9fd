"""Training of SpecVLM's gate after its compressors: it learns which of them is best for which question.

With the recipe's `gate_learns="along"` it is trained in every step instead (`Gate.draw` in mmspec/drafters/specvlm.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmspec.drafters.specvlm import SELECT, SpecVlmDrafter
from mmspec.train.objective import losses
from mmspec.train.recipes import Recipe
from mmspec.train.trace import Teaches, Trace


def learns_after(drafter: nn.Module, recipe: Recipe) -> bool:
    """Whether a drafter has a gate of the kind "select" that was not trained jointly."""
    chooses = isinstance(drafter, SpecVlmDrafter) and drafter.gate is not None and drafter.config.gate == SELECT
    return chooses and recipe.gate_learns == "after"


def learn(drafter: SpecVlmDrafter, teacher: Teaches, traces: Iterable[Trace], recipe: Recipe) -> dict[str, float]:
    """Train only the gate, on the cost of every branch for some samples.

    It minimises Σ_i π_i (L_i + c · n_i / N), where π is the softmax of its logits, L_i the drafter's loss through
    branch i, n_i how many of N visual rows that leaves, and c the recipe's `gate_cost`. Ours: SpecVLM (arXiv
    2509.11815) trains the gate jointly, and specifies neither the sampling of branches nor a cost. Here the mean over
    branches is exact, and every branch is trained before one is preferred.

    Args:
        traces: of one sample each.

    Returns:
        The share of the samples that choose each branch, largest first.
    """
    drafter.eval()
    assert drafter.gate is not None
    plain = replace(recipe, rollouts=0, noise=0.0)
    branches = []
    for name in drafter.config.branches:
        fixed = copy.copy(drafter)  # the same weights
        fixed.config = replace(drafter.config, gate=name)
        branches.append(fixed)
    encoded, costs = [], []
    with torch.no_grad():
        for trace in traces:
            prompt = trace.valid[:, :-1] & ~trace.answered[:, 1:]
            encoded.append(drafter.gate.question_of(trace.features[:, :-1], trace.visual[:, 1:], prompt))
            costs.append(torch.stack([_cost(fixed, teacher, trace, plain) for fixed in branches]))
    questions, table = torch.cat(encoded), torch.stack(costs)  # [N, F], [N, branches]
    optimizer = torch.optim.AdamW(drafter.gate.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(recipe.gate_steps):
        loss = (drafter.gate(questions).softmax(-1) * table).sum(-1).mean()
        loss.backward()
        optimizer.step()
        drafter.zero_grad(set_to_none=True)
    chosen = Counter(drafter.gate(questions).argmax(-1).tolist())
    return {drafter.config.branches[i]: n / len(questions) for i, n in chosen.most_common()}


def _cost(fixed: SpecVlmDrafter, teacher: Teaches, trace: Trace, recipe: Recipe) -> Tensor:
    """The cost of one branch for one sample: its loss plus the cost of its visual rows."""
    loss = losses(fixed, fixed, teacher, trace, recipe)[0]
    seen, valid = trace.visual[:, 1:], trace.valid[:, :-1]
    positions = torch.arange(seen.shape[1], device=seen.device)[None]
    entering = fixed.encode_prompt(trace.embeds[:, 1:], trace.features[:, :-1], seen, valid, positions)
    visual = ((seen > 0) & valid).sum().clamp(min=1)
    left = entering.valid.sum() - (valid & (seen == 0)).sum()
    return loss + recipe.gate_cost * left / visual
