"""What our pipelines that draw have in common: classes, kinds of output, a seed for each picture, offloaded modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

OUTPUTS = ("pil", "pt", "np", "latent")


def class_ids(given: Any, classes: int, names: Mapping[str, int] | None = None) -> list[int]:
    """The numbers of one or several classes, given by number or by name.

    Raises:
        ValueError: a name that is not known, or no number of a class.
    """
    found = given.reshape(-1).tolist() if hasattr(given, "reshape") else given  # a tensor or an array
    known, found = names or {}, [found] if isinstance(found, (int, float, str)) else list(found)
    ids = [known.get(one, one) if isinstance(one, str) else one for one in found]
    wrong = [one for one in ids if one not in range(classes)]
    if wrong or not ids:
        may = "names in id2label or numbers" if known else "numbers"
        raise ValueError(f"class_labels are {may} from 0 to {classes - 1}; got {wrong or 'none'}")
    return [int(one) for one in ids]


def seeds(generator: Any, rows: int) -> list[int]:
    """A seed per picture, drawn from its own generator or from the common one."""
    if isinstance(generator, (list, tuple)):
        if len(generator) != rows:
            raise ValueError(f"generator must be one, or one for each of the {rows} pictures; got {len(generator)}")
        return [seeds(each, 1)[0] for each in generator]
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**62, (rows,), generator=generator, device=device).tolist()
