"""Muon, an optimizer for matrices, in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum steps (Jordan et al. 2024), with the rate scaled to the size of AdamW's steps.

    `torch.optim.Muon` with its Newton-Schulz iteration in float32 instead of bfloat16, which is ten times slower on a
    CPU without bfloat16 arithmetic. Kernels of convolutions are treated as matrices with one row per output channel.
    """

    def __init__(self, weights: list[nn.Parameter], lr: float, weight_decay: float, iterations: int = 5) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self.iterations = iterations

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in (w for w in group["params"] if w.grad is not None):
                if weight not in self.state:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                momentum = self.state[weight]["momentum_buffer"]
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"]).flatten(1)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                size = group["lr"] * 0.2 * max(update.shape) ** 0.5
                weight.sub_(_orthogonal(update, self.iterations).view_as(weight), alpha=size)


def _orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Approximates U Vᵀ of the singular value decomposition by a quintic Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / matrix.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x
