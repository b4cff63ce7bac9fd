"""MAR's sampler: DDPM with learned variance on few steps, with temperature and optionally noise at the last step."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_ddpm import DDPMSchedulerOutput
from torch import Tensor

from mmspec.continuous import denoising
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
        temperature: scales the noise of the steps, not the first state; for `step`.
    """

    order = 1
    init_noise_sigma = 1.0

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        final_noise: bool = False,
        skip_terminal: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.alphas_cumprod = alpha_bar(num_train_timesteps)
        self.set_timesteps(min(100, num_train_timesteps))

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps for `step` and `kernel`."""
        self.num_inference_steps = num_inference_steps
        self.current = self.chain(num_inference_steps, device)
        self.timesteps = self.current.timesteps

    def chain(self, steps: int, device: torch.device | str | None = None) -> Chain:
        """The sampler's steps, evenly spaced over the training timesteps, both ends included. Raises ValueError: fewer
        than two steps (three with `skip_terminal`), or more than training timesteps."""
        T = self.config["num_train_timesteps"]
        least = 2 + self.config["skip_terminal"]
        if not least <= steps <= T:
            raise ValueError(f"the number of steps must be from {least} to {T}; got {steps}")
        stride = [(T - 1) / (steps - 1)] * (steps - 1)  # added up as in the published code, for exact halves
        times = torch.tensor([round(time) for time in accumulate(stride, initial=0.0)])
        bar = self.alphas_cumprod[times]
        before = torch.cat([torch.ones(1, dtype=torch.float64), bar[:-1]])
        beta = 1 - bar / before
        tilde = (1 - before) / (1 - bar) * beta
        tilde[0] = tilde[1]  # for the last step it would be 0
        clean, x = beta * before.sqrt() / (1 - bar), (1 - before) * (1 - beta).sqrt() / (1 - bar)
        table = torch.stack([bar.sqrt(), (1 - bar).sqrt(), clean, x, beta.log(), tilde.log()], 1).flip(0)
        keep = slice(int(self.config["skip_terminal"]), None)
        clock = times.flip(0)[keep].to(device)
        return Chain(clock, table[keep].float().to(device), self.config["final_noise"])

    def kernel(self, out: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation [..., C] of steps k [...] from states x [..., C].

        Args:
            out: [..., 2·C], the network's ε and v.
            k: int64, counted from the noisiest step.
        """
        return denoising.kernel(x, (out.float(), None), None, self._row(k, x))

    def _row(self, k: Tensor, x: Tensor) -> list[Tensor]:
        """The coefficients [..., 1] of steps k."""
        return list(self.current.numbers.to(x.device)[k][..., None].unbind(-2))

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> DDPMSchedulerOutput | tuple[Tensor, ...]:
        """One step from `sample` [N, C] with the network's output [N, 2·C]; one timestep for all or per row."""
        clock = self.timesteps.to(sample.device)
        times = torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        k = (clock == times[:, None]).int().argmax(1)
        noise = torch.randn(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
        noisy = self.config["final_noise"] | (k + 1 < len(clock))
        shaken = noisy[:, None] * self.config["temperature"] * noise
        before, _ = denoising.step(sample, (model_output.float(), None), None, shaken, self._row(k, sample))
        root, rest = self.current.table.to(sample.device)[k, :2, None].unbind(1)
        clean = (sample - rest * model_output.chunk(2, -1)[0]) / root
        return DDPMSchedulerOutput(before, clean) if return_dict else (before, clean)

    def scale_model_input(self, sample: Tensor, timestep: Tensor | None = None) -> Tensor:
        return sample

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Samples [N, C] with the noise of training timesteps [N]."""
        bar = self.alphas_cumprod.to(original_samples.dtype).to(timesteps.device)[timesteps, None]
        return bar.sqrt() * original_samples + (1 - bar).sqrt() * noise

    def __len__(self) -> int:
        return self.config["num_train_timesteps"]


def alpha_bar(steps: int) -> Tensor:
    """ᾱ, float64 [steps], of the cosine schedule with β ≤ 0.999 (Nichol & Dhariwal 2021, arXiv 2102.09672, eq. 17)."""

    def left(s: float) -> float:
        return math.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2

    beta = [min(1 - left((i + 1) / steps) / left(i / steps), 0.999) for i in range(steps)]
    return torch.cumprod(1 - torch.tensor(beta, dtype=torch.float64), 0)
