"""MAR's sampler: DDPM with learned variance on few steps, optionally with noise at the last step."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from mmspec.continuous.denoising import Chain


class MARScheduler(SchedulerMixin, ConfigMixin):
    """DDPM with a cosine schedule, as MAR uses it (Li et al. 2024, arXiv 2406.11838, §3.2; Nichol & Dhariwal 2021).

    Networks return ε and v, which interpolates the log variance between β̃ and β. x̂₀ is not clipped.

    Args:
        num_train_timesteps: of the schedule that the network is trained on.
        final_noise: add noise at the last step, too, with the variance of the step before. The published sampler does
            not; exact speculation needs it.
        skip_terminal: skip the first step and start from noise at the second. At the first √ᾱ is so small that the
            network's error is amplified by a factor of hundreds; the published sampler takes that step.
    """

    @register_to_config
    def __init__(self, num_train_timesteps: int = 1000, final_noise: bool = False, skip_terminal: bool = False) -> None:
        self.alphas_cumprod = alpha_bar(num_train_timesteps)

    def check(self, steps: int) -> None:
        """Raise ValueError for fewer than two steps (three with `skip_terminal`), or more than training timesteps."""
        least, most = 2 + self.config["skip_terminal"], self.config["num_train_timesteps"]
        if not least <= steps <= most:
            raise ValueError(f"the number of steps must be from {least} to {most}; got {steps}")

    def chain(self, steps: int, device: torch.device | str | None = None) -> Chain:
        """The sampler's steps, evenly spaced over the training timesteps, both ends included.

        Raises ValueError: see `check`.
        """
        self.check(steps)
        T = self.config["num_train_timesteps"]
        stride = [(T - 1) / (steps - 1)] * (steps - 1)  # added up as in the published code, for exact halves
        times = torch.tensor([round(time) for time in accumulate(stride, initial=0.0)], device="cpu")
        bar = self.alphas_cumprod[times]
        before = torch.cat([bar.new_ones(1), bar[:-1]])
        beta = 1 - bar / before
        tilde = (1 - before) / (1 - bar) * beta
        tilde[0] = tilde[1]  # for the last step it would be 0
        clean, x = beta * before.sqrt() / (1 - bar), (1 - before) * (1 - beta).sqrt() / (1 - bar)
        table = torch.stack([bar.sqrt(), (1 - bar).sqrt(), clean, x, beta.log(), tilde.log()], 1).flip(0)
        keep = slice(int(self.config["skip_terminal"]), None)
        clock = times.flip(0)[keep].to(device)
        return Chain(clock, table[keep].float().to(device), self.config["final_noise"])


def alpha_bar(steps: int) -> Tensor:
    """ᾱ, float64 [steps], of the cosine schedule with β ≤ 0.999 (Nichol & Dhariwal 2021, arXiv 2102.09672, eq. 17)."""

    def left(s: float) -> float:
        return math.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2

    beta = [min(1 - left((i + 1) / steps) / left(i / steps), 0.999) for i in range(steps)]
    return torch.cumprod(1 - torch.tensor(beta, dtype=torch.float64, device="cpu"), 0)
