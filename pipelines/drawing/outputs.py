"""Common code of mmspec's image pipelines: their base, class labels, output types, and a seed for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

OUTPUTS = ("pil", "pt", "np", "latent")
Pictures = list[Image.Image] | Tensor | np.ndarray  # images for the first three of OUTPUTS, tokens for the last
Generators = torch.Generator | list[torch.Generator] | tuple[torch.Generator, ...] | None
Labels = int | str | Sequence[int | str] | Tensor | np.ndarray  # class numbers or names


class OffloadedWhole(DiffusionPipeline):
    """A pipeline whose models are offloaded as a whole, or not at all."""

    def enable_sequential_cpu_offload(self, *_: object, **__: object) -> None:
        """Raise ValueError: weights are also read outside of the forwards of their layers."""
        raise ValueError(
            "the models of this pipeline are not offloaded layer by layer, since each token would move all weights; "
            "call enable_model_cpu_offload()"
        )


def class_ids(given: Labels, classes: int, names: Mapping[str, int] | None = None) -> list[int]:
    """The numbers of one or several classes, given by number or by name.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """
    plain: Any = given.reshape(-1).tolist() if hasattr(given, "reshape") else given  # a tensor or an array
    table, single = names or {}, isinstance(plain, (int, float, str, type(None)))
    each: list[Any] = [plain] if single else list(plain)
    ids = [table.get(one, one) if isinstance(one, str) else one for one in each]
    wrong = [one for one in ids if one not in range(classes)]
    if wrong or not ids:
        allowed = "names in id2label or numbers" if table else "numbers"
        raise ValueError(f"class_labels are {allowed} from 0 to {classes - 1}; got {wrong or 'none'}")
    return [int(one) for one in ids]


def seeds(generator: Generators, rows: int) -> list[int]:
    """A seed for each image, drawn from its own generator or from the common one."""
    if isinstance(generator, (list, tuple)):
        if len(generator) != rows:
            raise ValueError(f"generator must be one, or one for each of the {rows} pictures; got {len(generator)}")
        return [seeds(each, 1)[0] for each in generator]
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(f"generator must be a torch.Generator, or one for each picture; got {generator!r}")
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**62, (rows,), generator=generator, device=device).tolist()
