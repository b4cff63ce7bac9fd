"""The rule of continuous speculative decoding as it was published: draft and target share their noise; approximate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.continuous.denoising import Chain, Path

WIDTH = 42.0  # the published code widens the last step's Gaussians by this much in its test
ROUNDS = 100  # of proposals for a refused token


@dataclass(frozen=True)
class End:
    """How paths ended: the last step's Gaussian, and the spread of all steps before it.

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
    """How these paths ended."""
    log_std = path.log_std[:, -1] + torch.log(torch.tensor(max(temperature, 1e-6)))
    noise = path.noise[:, -1] if chain.noisy(len(chain) - 1) else torch.zeros_like(path.x)
    mean = path.x if temperature <= 0 else path.x - log_std.exp() * noise
    return End(mean, log_std, path.log_std[:, :-1].sum((1, 2)))


def log_chance(x: Tensor, p: End, q: End, width: float = WIDTH) -> Tensor:
    """The log of the chance to keep drafted tokens x [R, C] (Wang et al. 2024, arXiv 2411.11925, §3.2, and its code).

    Not a ratio of densities at x: p and q come from two paths that share their noise but not their states, Gaussians of
    `width` times their standard deviation are compared, and the spreads of the earlier steps enter the other way round
    than that of the last. Kept as published; in logarithms, because the products underflow.
    """

    def far(of: End) -> Tensor:
        return 0.5 * (((x - of.mean) / (width * of.log_std.exp())) ** 2).sum(1)

    last = (q.log_std - p.log_std).sum(1)
    return (far(q) - far(p) + last + p.before - q.before).clamp(max=0.0)


def leftover(p: End, q: End, noise: Tensor, coins: Tensor) -> Tensor:
    """Tokens [R, C] in place of refused ones: proposals from p's last Gaussian, kept with (p − q/F)+ / p, F as above.

    Published code leaves a token at zero that no proposal replaced; here it gets the mean of p. Of several proposals
    that are kept it takes the last, here it is the first; being independent draws, the two have one distribution.

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
