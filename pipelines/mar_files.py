"""MAR's published files (the authors' .pth or the safetensors of mirrors, and the LDM-style VAE) as our models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import AutoencoderKL


def build_vae(
    channels: Sequence[int], latent: int, groups: int, side: int, layers: int = 1, attention: bool = False,
    scaling_factor: float = 1.0,
) -> Any:  # fmt: skip
    """An AutoencoderKL with one level per entry of `channels`, random weights."""
    down = ["DownEncoderBlock2D"] * len(channels)
    if attention:
        down[-1] = "AttnDownEncoderBlock2D"
    return AutoencoderKL(
        down_block_types=tuple(down), up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=tuple(channels), layers_per_block=layers, latent_channels=latent, norm_num_groups=groups,
        sample_size=side, scaling_factor=scaling_factor,
    )  # fmt: skip
