"""The denoising step of a MAR head as compiled functions, one for each number of tokens (`compile=True`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmspec.compile.capture import PiecewiseFunction, compare
from mmspec.compile.capture_cache import CaptureCache, unattended, weights
from mmspec.continuous import denoising
from mmspec.models.mar_head import Denoiser
from mmspec.modes import computed_in, lasting


class Steps(CaptureCache):
    """Compiled steps of one head, by shape."""

    def draw(
        self, net: denoising.Net, chain: denoising.Chain, noise: Tensor, temperature: float = 1.0
    ) -> denoising.Path:
        """As `denoising.draw`; the tokens are padded to a power of two, so that there are few shapes."""
        if not isinstance(net, Denoiser):
            return denoising.draw(net, chain, noise, temperature)
        R = len(noise)
        full = 1 << (R - 1).bit_length()
        if full > R:
            rows = torch.arange(full, device=noise.device).clamp(max=R - 1)
            net, noise = net.take(rows), noise[rows]
        path = self._draw(net, chain, noise, temperature)
        return path if full == R else path.take(slice(R))

    def _draw(self, net: Denoiser, chain: denoising.Chain, noise: Tensor, temperature: float) -> denoising.Path:
        start, shaken = noise[:, 0], chain.shaken(noise[:, 1:], temperature)
        shaken = shaken.transpose(0, 1).contiguous()  # of all steps in one copy
        step = self._step(net, chain, start, shaken[0])
        if step is None:
            return denoising.draw(net, chain, noise, temperature)
        x, states, spread = start, [start], []
        for k in range(len(chain)):
            x, log_std = step(unattended, *_inputs(net, chain, x, shaken[k], k))
            states.append(x)
            spread.append(log_std)
        return denoising.Path(torch.stack(states, 1), noise[:, 1:], torch.stack(spread, 1))

    def _step(self, net: Denoiser, chain: denoising.Chain, x: Tensor, noise: Tensor) -> PiecewiseFunction | None:
        key = (x.shape, net.guidance is None, x.device, net.cond.dtype)
        inputs = _inputs(net, chain, x, noise, 0)

        def make() -> PiecewiseFunction:
            with lasting():
                captured = PiecewiseFunction(_function(net), [t.clone() for t in inputs], weights(net.bound.head))
            mine = captured(unattended, *inputs)
            stock = denoising.step(x, net.at(x, 0), net.guidance, noise, chain.steps[0])
            compare(mine, stock, computed_in(net.cond.dtype, x.device))
            return captured

        return self.get(key, make)


of = Steps.of


def _inputs(net: Denoiser, chain: denoising.Chain, x: Tensor, noise: Tensor, k: int) -> list[Tensor]:
    inputs = [x, noise, chain.numbers[k], net.modulation(k)]
    return inputs if net.guidance is None else [*inputs, net.guidance]


def _function(net: Denoiser) -> Callable[..., list[Tensor]]:
    """A step as a function of tensors, for the number of tokens of `net`."""

    def step(x: Tensor, noise: Tensor, numbers: Tensor, table: Tensor, *guidance: Tensor) -> list[Tensor]:
        return list(denoising.step(x, net.out(x, table), guidance[0] if guidance else None, noise, numbers.unbind(0)))

    return step
