"""Builds and trains the embedded continuous image models: their AutoencoderKL, then a large and a small MAR on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.app.zoo.fit import fit
from mmspec.pipelines.mar_files import build_vae
from mmspec.zoo import classes
from mmspec.zoo.recipes import Autoencoder, MarRecipe, Trunk

Say = Callable[[str], None]
_VAE, _TARGET, _DRAFT = 11, 12, 13  # which stage a random state belongs to
STAGES = ("vae", "target", "draft")  # names of their checkpoints


def pixels(samples: list[classes.Sample]) -> Tensor:
    """[B, 3, SIDE, SIDE] in [−1, 1]."""
    held = np.stack([np.asarray(classes.render(sample)) for sample in samples])
    return torch.from_numpy(held).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(recipe: MarRecipe, work: Path, say: Say) -> Any:
    """Train the autoencoder, or go on from its checkpoint in `work`; its latents are scaled to unit variance."""
    plan = recipe.vae
    torch.manual_seed(recipe.seed)
    vae: Any = build_vae(plan.channels, plan.latent, plan.groups, classes.SIDE)

    def loss_at(step: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng((recipe.seed, _VAE, step))
        seen = pixels([classes.draw(rng) for _ in range(plan.plan.batch)])
        posterior = vae.encode(seen).latent_dist
        noise = torch.from_numpy(rng.standard_normal(posterior.mean.shape)).float()
        made = vae.decode(posterior.mean + posterior.std * noise).sample
        apart = F.mse_loss(made, seen) + 0.2 * F.l1_loss(made, seen)
        return apart + plan.kl * posterior.kl().mean() / posterior.mean[0].numel(), len(seen)

    fit(vae, plan.plan, loss_at, work / "vae.pt", say)
    vae.eval().requires_grad_(False)
    rng = np.random.default_rng((recipe.seed, _VAE))
    latents = vae.encode(pixels([classes.draw(rng) for _ in range(64)])).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / latents.std()))
    return vae
