"""The head's denoising step as one compiled function, for every number of tokens that comes up (`compile=True`)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmspec import paths
from mmspec.capture import Captured
from mmspec.models.mar_head import Denoiser

_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number; rounding, no more


class Steps:
    """Compiled steps of one head, by shape. What cannot be compiled runs as it is, with a warning.

    A function is trusted once it gave what the uncompiled step gives on the first states of its shape; other weights
    than then, and all is compiled anew.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Captured | None] = {}
        self._weights: tuple[int, ...] = ()
        self._lock = threading.Lock()

    def check(self, head: Any) -> None:
        """Let go what was compiled for other weights."""
        weights = tuple(map(id, head.parameters()))
        if weights != self._weights:
            self._held, self._weights = {}, weights

    def draw(self, net: Any, chain: paths.Chain, noise: Tensor, temperature: float = 1.0) -> paths.Path:
        """As `paths.draw`; the tokens are filled up to a power of two, so that few shapes come up."""
        if not isinstance(net, Denoiser):
            return paths.draw(net, chain, noise, temperature)
        many, R = net.times, net.tokens
        full = 1 << (R - 1).bit_length()
        if full > R:
            rows = torch.arange(full, device=noise.device).clamp(max=R - 1)
            net, noise = net.take(rows), noise.unflatten(0, (many, R))[:, rows].flatten(0, 1)
        path = self._draw(net, chain, noise, temperature)
        if full == R:
            return path
        return path.take(torch.arange(many * full, device=noise.device).view(many, full)[:, :R].flatten())

    def _draw(self, net: Denoiser, chain: paths.Chain, noise: Tensor, temperature: float) -> paths.Path:
        start, shaken = noise[:, 0].contiguous(), chain.shaken(noise[:, 1:], temperature).transpose(0, 1).contiguous()
        step = self._step(net, chain, start, shaken[0])
        if step is None:
            return paths.draw(net, chain, noise, temperature)
        x, states, spread = start, [start], []
        for k in range(len(chain)):
            x, log_std = step(None, *_inputs(net, chain, x, shaken[k], k))
            states.append(x)
            spread.append(log_std)
        return paths.Path(torch.stack(states, 1), noise[:, 1:], torch.stack(spread, 1))

    def _step(self, net: Denoiser, chain: paths.Chain, x: Tensor, noise: Tensor) -> Any:
        key = (x.shape, net.times, net.guidance is None, x.device, net.cond.dtype)
        if key not in self._held:
            with self._lock:
                self._held[key] = self._compiled(net, chain, x, noise)
        return self._held[key]

    def _compiled(self, net: Denoiser, chain: paths.Chain, x: Tensor, noise: Tensor) -> Captured | None:
        given, why = _inputs(net, chain, x, noise, 0), ""
        try:
            with torch.inference_mode(False), torch.no_grad():
                made = Captured(_function(net), [t.clone() for t in given], net.bound.head.parameters())
            mine = made(None, *given)  # type: ignore[arg-type]  # there is no attention
        except Exception as error:  # no compiler, an operation it does not know: all leave the uncompiled step
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            stock = paths.step(x, net.at(x, 0), net.guidance, noise, chain.steps[0])
            apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(stock, mine, strict=True))
            near = apart <= _NEAR.get(net.cond.dtype, 1e-4)
            why = "" if near else f"its steps would be {apart:.1e} away from the uncompiled ones"
        if why:
            warnings.warn(f"mmspec runs MAR's head uncompiled: {why}", stacklevel=2)
        return None if why else made


_OF: WeakKeyDictionary[Any, Steps] = WeakKeyDictionary()


def of(head: Any) -> Steps:
    """What is compiled of a head; it goes with the head."""
    found = _OF.setdefault(head, Steps())
    found.check(head)
    return found


def _inputs(net: Denoiser, chain: paths.Chain, x: Tensor, noise: Tensor, k: int) -> list[Tensor]:
    inputs = [x, noise, chain.numbers[k], net.modulation(k)]
    return inputs if net.guidance is None else [*inputs, net.guidance]


def _function(net: Denoiser) -> Callable[..., list[Tensor]]:
    """A step as a function of tensors, for as many tokens as `net` has."""

    def step(x: Tensor, noise: Tensor, numbers: Tensor, table: Tensor, *guidance: Tensor) -> list[Tensor]:
        return list(paths.step(x, net.out(x, table), guidance[0] if guidance else None, noise, numbers.unbind(0)))

    return step
