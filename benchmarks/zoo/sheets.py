"""Pictures of the zoo's models: as tensors, drawn in batches, laid out in pairs; and folders that all may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

BATCH = 16


def pixels(shown: Sequence[Image.Image]) -> torch.Tensor:
    """[B, 3, side, side] in [−1, 1]."""
    held = np.stack([np.asarray(picture) for picture in shown])
    return torch.from_numpy(held).permute(0, 3, 1, 2).float() / 127.5 - 1


def readable(folder: Path) -> None:
    """Let everybody read what lies there; safetensors writes for its owner alone."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)


def psnr(made: torch.Tensor, seen: torch.Tensor) -> float:
    """Of pictures in [−1, 1], in dB."""
    return float(10 * torch.log10(4 / F.mse_loss(made, seen)))


def parameters(networks: Mapping[str, object]) -> dict[str, int]:
    """How many each network among these has."""
    modules = {name: part for name, part in networks.items() if isinstance(part, torch.nn.Module)}
    return {name: sum(weight.numel() for weight in part.parameters()) for name, part in modules.items()}


def drawn(pipe: Any, asked: Sequence[object]) -> list[Image.Image]:
    """A picture for each thing asked, the same ones every time."""
    pipe.set_progress_bar_config(disable=True)
    made: list[Image.Image] = []
    for start in range(0, len(asked), BATCH):
        made += pipe(list(asked[start : start + BATCH]), generator=torch.Generator().manual_seed(start)).images
    return made


def paired(above: Sequence[Image.Image], below: Sequence[Image.Image]) -> Image.Image:
    """Two halves of pairs, one over the other, in 256 colours: above each picture stands its like."""
    across, side = len(above) // 2, above[0].width + 2
    whole = Image.new("RGB", (across * side, 4 * side), "white")
    for i, pair in enumerate(zip(above, below, strict=True)):
        x, y = i % across * side, i // across * 2 * side
        for row, picture in enumerate(pair):
            whole.paste(picture, (x, y + row * side))
    return whole.quantize()
