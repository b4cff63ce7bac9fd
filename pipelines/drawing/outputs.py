"""What our pipelines that draw have in common: kinds of output, a seed for each picture, modules that are offloaded."""

from __future__ import annotations

from typing import Any

import torch

OUTPUTS = ("pil", "pt", "np", "latent")


def seeds(generator: Any, rows: int) -> list[int]:
    """A seed per picture, drawn from its own generator or from the common one."""
    if isinstance(generator, (list, tuple)):
        if len(generator) != rows:
            raise ValueError(f"generator must be one, or one for each of the {rows} pictures; got {len(generator)}")
        return [seeds(each, 1)[0] for each in generator]
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**62, (rows,), generator=generator, device=device).tolist()


def wake(module: Any) -> None:
    """Bring a module that diffusers has offloaded to its device, as a call of `forward` would."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
