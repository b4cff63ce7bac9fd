"""Reads published weight files of image models, and builds models that need exactly their tensors."""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from mmspec.checkpoints.files import read_tensors

T = TypeVar("T", bound=nn.Module)


def tensors_in(path: Path, containers: Sequence[str], of: str, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The tensors of a torch or safetensors file, or of a folder; if it has any of `containers`, those of the first.

    Args:
        path: the file or folder.
        containers: keys under which a training script may have put its weights.
        of: the model's name, for the error message.
        allow_pickle: also allow an `argparse.Namespace`, which authors' training scripts store with the weights.
            Nothing else is unpickled, and no code is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a damaged file, not a checkpoint, or one that needs `allow_pickle`.
    """
    whole = path.is_dir() or path.suffix == ".safetensors"
    content: object = read_tensors(path) if whole else _unpickled(path, allow_pickle)
    for name in containers:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise ValueError(
            f"{path.name} contains no table of tensors, neither at its top level nor under {', '.join(containers)}; "
            f"is it a checkpoint of {of}?"
        )
    return dict(content)


def _unpickled(path: Path, allow_pickle: bool) -> object:
    try:
        with torch.serialization.safe_globals([argparse.Namespace] if allow_pickle else []):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        advice = (
            "more than tensors and argparse.Namespace; it is refused"
            if allow_pickle
            else "more than tensors; files of training scripts may contain an argparse.Namespace, which "
            "allow_pickle=True (CLI: --allow-pickle) allows, and nothing else"
        )
        raise ValueError(f"{path.name} is damaged, or contains {advice}") from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path.name} is damaged or incomplete ({error}); download it again") from error


def filled(kind: type[T], config: Mapping[str, object], tensors: dict[str, Tensor]) -> T:
    """A model of this class and configuration with exactly these tensors."""
    with torch.device("meta"):
        expected = kind(**config).state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{key} is {list(tensors[key].shape)}, expected {list(t.shape)}"
        for key, t in expected.items()
        if key in tensors and tensors[key].shape != t.shape
    ]
    if missing or extra or wrong:
        raise ValueError(
            f"the tensors are not those of a {kind.__name__}: missing: {listed(missing)}; unexpected: "
            f"{listed(extra)}; wrong shapes: {listed(wrong)}. Is the file complete, and of this kind?"
        )
    model = kind(**config)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def listed(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """How many different numbers the first group of a pattern matches in the names."""
    return len({match[1] for key in tensors if (match := re.match(pattern, key))})


def need(tensors: Mapping[str, Tensor], of: str, *names: str) -> None:
    """Raise ValueError if one of these tensors is missing; `of` is the model's name, for the message."""
    absent = [name for name in names if name not in tensors]
    if absent:
        found = listed(sorted(tensors), 4)
        raise ValueError(f"the tensors are not {of}'s: missing: {listed(absent)}; found: {found}")
