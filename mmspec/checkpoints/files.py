"""The files of a checkpoint, in a folder or on the hub: where they are, config.json, the tensors; no code is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as briefly
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

CONFIG, WEIGHTS, INDEX, PICKLE = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
TRAINED = "drafter"  # where `mmspec train --out FOLDER` puts it, in FOLDER
LONGEST = 2**26  # bytes of a JSON file; the index of the largest checkpoints has a tenth of it
Json = Mapping[str, Any]  # an object of config.json, in which anything may stand
Settings = dict[str, Any]  # the same while it is made, or the values of a config by name
_SAFE = [CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors"]


def locate(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder or file of that name on this machine, fetched from the hub if it is an owner/name there.

    Raises:
        FileNotFoundError: neither here nor there; HF_HUB_OFFLINE is honoured.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        made = path / TRAINED
        return made if (made / CONFIG).is_file() and not (path / CONFIG).is_file() else path
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise FileNotFoundError(f"there is no folder or file {name!r}; pass one that exists, or owner/name on the hub")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_SAFE))
        if not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, PICKLE]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"{name!r} is neither a folder here nor could it be fetched from the Hugging Face hub"
            f"{f' at revision {revision}' if revision else ''}: {reason[0]}"
        ) from error
    return folder


def read_config(path: Path) -> Settings:
    """config.json of a folder, or beside a file."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    if not config.is_file():
        there = ", ".join(sorted(p.name for p in config.parent.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"{config.parent} has no {CONFIG}, which a drafter needs; it holds {there}")
    return _json(config)


def read_tensors(path: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder: model.safetensors, its shards, or pytorch_model.bin, in this order.

    Other *.safetensors in a folder are not looked at: trainers leave frozen heads and optimiser states there.

    Args:
        path: a folder or a file.
        allow_pickle: run whatever code a .bin file asks for. Only for files whose author you trust.

    Raises:
        FileNotFoundError: no weights there.
        ValueError: a damaged file, or one that needs `allow_pickle`.
    """
    if path.is_file():
        return _safe(path) if path.suffix == ".safetensors" else _pickled(path, allow_pickle)
    if (path / WEIGHTS).is_file():
        return _safe(path / WEIGHTS)
    if (path / INDEX).is_file():
        return _shards(path)
    if (path / PICKLE).is_file():
        return _pickled(path / PICKLE, allow_pickle)
    raise FileNotFoundError(f"{path} holds no weights; a drafter's folder has {WEIGHTS}, {INDEX} or {PICKLE}")


def _json(path: Path) -> Settings:
    if path.stat().st_size > LONGEST:
        raise ValueError(
            f"{path.name} has {path.stat().st_size} bytes, over {LONGEST}; it is no {path.name} of a model"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error}); is it complete?") from error
    except RecursionError as error:
        raise ValueError(
            f"{path.name} is nested too deep to be read; a drafter's has three levels; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a JSON object; it holds a {type(content).__name__}")
    return content


def _safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # SafetensorError for most damage, others for types that torch has not
        raise ValueError(f"{path.name} is damaged or cut short ({error}); fetch or write it again") from error


def index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a folder lists them.

    Raises:
        ValueError: damaged, or it names files elsewhere.
    """
    listed = _json(folder / INDEX).get("weight_map")
    named = list(listed.values()) if isinstance(listed, dict) else []
    strange = [file for file in named if not isinstance(file, str) or Path(file).name != file or "\0" in file]
    if not named or strange:
        shown = briefly(strange or listed)
        raise ValueError(f"weight_map in {INDEX} must name files of the same folder, as texts; it has {shown}")
    return dict(zip(listed, named, strict=True)) if isinstance(listed, dict) else {}


def _shards(folder: Path) -> dict[str, Tensor]:
    files = sorted(set(index_of(folder).values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise FileNotFoundError(f"{INDEX} lists {', '.join(absent)}, which {folder} does not hold")
    return {key: tensor for file in files for key, tensor in _safe(folder / file).items()}


def _pickled(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path.name} is damaged, or holds more than tensors and would run code when loaded; nothing was run. "
            "Ask its author for safetensors, or, if you trust them, pass allow_pickle=True (CLI: --allow-pickle)"
        ) from error
    except Exception as error:  # torch meets bytes that are no file of its own with errors of any kind
        raise ValueError(f"{path.name} is damaged or cut short ({error}); fetch it again") from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{path.name} must hold a dict of nothing but tensors; it holds a {type(content).__name__}")
    size = path.stat().st_size
    strange = [key for key, tensor in content.items() if not isinstance(key, str) or not _held(tensor, size)]
    if strange:
        raise ValueError(
            f"{path.name} holds no plain tensors, or larger ones than itself: {briefly(strange)}; fetch it again"
        )
    return {key: tensor.detach() for key, tensor in content.items()}


def _held(tensor: Tensor, size: int) -> bool:
    """Whether a file of so many bytes can hold this tensor: one that repeats few numbers could fill all memory."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() * tensor.element_size() <= size
