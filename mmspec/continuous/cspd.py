"""The published, approximate acceptance rule of continuous speculative decoding (CSpD), with shared noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.continuous.denoising import Chain, Path

WIDTH = 42.0  # the published code widens the last step's Gaussians by this much in its test
ROUNDS = 100  # of proposals for a rejected token


@dataclass(frozen=True)
class End:
    """The end of some paths: the last step's Gaussian, and the standard deviations of all steps before it.

    Attributes:
        mean, log_std: [R, C], of the last step; the standard deviation includes the temperature.
        before: [R], the sum of the log standard deviations of the earlier steps.
    """

    mean: Tensor
    log_std: Tensor
    before: Tensor

    def take(self, rows: Tensor) -> End:
        return End(self.mean[rows], self.log_std[rows], self.before[rows])


def end(path: Path, chain: Chain, temperature: float = 1.0) -> End:
    """The `End` of these paths."""
    log_std = path.log_std[:, -1] + torch.log(torch.tensor(max(temperature, 1e-6)))
    noise = path.noise[:, -1] if chain.noisy(len(chain) - 1) else torch.zeros_like(path.x)
    mean = path.x if temperature <= 0 else path.x - log_std.exp() * noise
    return End(mean, log_std, path.log_std[:, :-1].sum((1, 2)))


def log_chance(x: Tensor, p: End, q: End, width: float = WIDTH) -> Tensor:
    """Log of the chance to accept draft tokens x [R, C] (Wang et al. 2024, arXiv 2411.11925, §3.2, and its code).

    It is not a ratio of densities at x: p and q come from two paths that share their noise but not their states,
    Gaussians with `width` times the standard deviation are compared, and the standard deviations of the earlier steps
    have the opposite sign of the last step's. As published; in logarithms, because the products underflow.
    """

    def distance(of: End) -> Tensor:
        return 0.5 * (((x - of.mean) / (width * of.log_std.exp())) ** 2).sum(1)

    last = (q.log_std - p.log_std).sum(1)
    return (distance(q) - distance(p) + last + p.before - q.before).clamp(max=0.0)


def leftover(p: End, q: End, noise: Tensor, coins: Tensor) -> Tensor:
    """Tokens [R, C] for rejected ones: proposals from p's last Gaussian, accepted with (p − q/F)+ / p, F as above.

    The published code leaves a token at zero if no proposal is accepted; here it gets the mean of p. Of several
    accepted proposals the published code takes the last, here it is the first; their distributions are the same.

    Args:
        noise: [ROUNDS, R, C], standard normal.
        coins: [ROUNDS, R].
    """
    proposals = p.mean + p.log_std.exp() * noise

    def log_density(of: End) -> Tensor:
        return -0.5 * (((proposals - of.mean) / of.log_std.exp()) ** 2).sum(2) - of.log_std.sum(1)

    ratio = (log_density(q) - log_density(p) - (p.before - q.before)).exp()
    kept = coins < 1 - ratio
    first = kept.int().argmax(0)
    chosen = proposals[first, torch.arange(len(first), device=first.device)]
    return torch.where(kept.any(0)[:, None], chosen, p.mean)
