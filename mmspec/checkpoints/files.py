"""Reading the files of a checkpoint from a folder or the hub: config.json and the tensors, without running code."""

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
TRAINED = "drafter"  # subfolder of FOLDER that `mmspec train --out FOLDER` writes
LONGEST = 2**26  # limit on the bytes of a JSON file; the index of the largest checkpoints has a tenth of that
Json = Mapping[str, Any]  # an untrusted object of config.json
Settings = dict[str, Any]  # a config.json to write, or the values of a config by name
_SAFE = [CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors"]


def locate(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The local folder or file of that name, or the downloaded snapshot of a hub repository owner/name.

    Raises FileNotFoundError: found neither locally nor on the hub; HF_HUB_OFFLINE is honoured.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        trained = path / TRAINED
        return trained if (trained / CONFIG).is_file() and not (path / CONFIG).is_file() else path
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
            f"{name!r} is not a local folder, and could not be downloaded from the Hugging Face hub"
            f"{f' at revision {revision}' if revision else ''}: {reason[0]}"
        ) from error
    return folder


def read_config(path: Path) -> Settings:
    """config.json of a folder, or of the folder of a file."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    if not config.is_file():
        found = ", ".join(sorted(p.name for p in config.parent.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"{config.parent} has no {CONFIG}, which a drafter needs; it holds {found}")
    return _json(config)


def read_tensors(path: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder: model.safetensors, its shards, or pytorch_model.bin, in this order.

    Other *.safetensors in a folder are ignored: trainers leave frozen heads and optimiser states there.

    Args:
        path: a folder or a file.
        allow_pickle: run any code in a .bin file. Only for files whose author you trust.

    Raises:
        FileNotFoundError: there are no weights.
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
            f"{path.name} has {path.stat().st_size} bytes, over {LONGEST}; it is not the {path.name} of a model"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error}); is it complete?") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply; a drafter's has three levels; fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a JSON object; it holds a {type(content).__name__}")
    return content


def _safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # SafetensorError for most damage, others for types that torch does not have
        raise ValueError(f"{path.name} is damaged or cut short ({error}); fetch or write it again") from error


def index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index file of a folder.

    Raises ValueError: the index is damaged, or names files in other folders.
    """
    listed = _json(folder / INDEX).get("weight_map")
    named = list(listed.values()) if isinstance(listed, dict) else []
    strange = [file for file in named if not isinstance(file, str) or Path(file).name != file or "\0" in file]
    if not named or strange:
        shown = briefly(strange or listed)
        raise ValueError(f"weight_map in {INDEX} must name files of the same folder, as strings; it has {shown}")
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
    except Exception as error:  # on other bytes torch may raise any error
        raise ValueError(f"{path.name} is damaged or cut short ({error}); fetch it again") from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{path.name} must hold a dict of nothing but tensors; it holds a {type(content).__name__}")
    size = path.stat().st_size
    strange = [key for key, tensor in content.items() if not isinstance(key, str) or not _fits(tensor, size)]
    if strange:
        raise ValueError(
            f"{path.name} holds tensors that are not plain, or larger than the file: {briefly(strange)}; fetch it again"
        )
    return {key: tensor.detach() for key, tensor in content.items()}


def _fits(tensor: Tensor, size: int) -> bool:
    """Whether a file of `size` bytes can hold this tensor: one that repeats a few numbers could fill all memory."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() * tensor.element_size() <= size
