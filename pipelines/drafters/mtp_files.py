"""Reads and writes the multi-token-prediction heads of a model's own checkpoint, in the known layouts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import __version__
from mmspec.checkpoints.files import CONFIG, read_config
from mmspec.checkpoints.save import save_drafter, write
from mmspec.pipelines.drafters import own_files
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.mtp import MtpHeads, filled
from mmspec.pipelines.host.names import origin

# The parts of a head before and after its block: name in the layout → mspec's name. In the first layout all heads
# share one of each.
_SHARED = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "post_norm",
}  # `mtp.*`: Qwen3-Next, Qwen3.5, Qwen3.6, Mellum
_EACH = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "post_norm",
}  # `layers.{N}.*`: DeepSeek-V3, GLM-4.5, GLM-4.5V, GLM-OCR, Step-3.7
_OF_TARGET = ("shared_head.head", "shared_head.output", "embed_tokens")  # copies of the target's head and embedding
_PREFIX = re.compile(r"^(?:model\.|language_model\.)*")


def found(model: GenerativeModel, where: Path | None = None) -> dict[str, Path]:
    """The tensors of such heads in the model's own files, by name; empty if there are none, or no files.

    Args:
        where: the folder with the heads, if it is not the model's own.

    Raises:
        ValueError: a damaged file or index.
    """
    where = where or own_files.folder(model)
    if where is None:
        return {}
    layers = len(decoder(model).layers)
    return {key: path for key, path in own_files.keys(where).items() if _place(key, layers) is not None}


def _place(key: str, layers: int) -> str | None:
    """A key without prefixes, as `mtp.…` or `layers.k.…` with k from 0; None: it does not belong to a head."""
    bare = _PREFIX.sub("", key)
    if bare.startswith("mtp."):
        return bare
    number = re.match(r"layers\.(\d+)\.", bare)
    if number is None or int(number[1]) < layers:
        return None
    return f"layers.{int(number[1]) - layers}.{bare[number.end() :]}"


def heads(model: GenerativeModel, where: Path | None = None) -> MtpHeads:
    """The heads of a model, loaded from its files (or from the folder `where`), on the CPU.

    Raises:
        ValueError: there are none, or they are incomplete, damaged, of another model, or of an unknown kind.
    """
    where = where or own_files.folder(model)
    names = found(model, where)
    if not names:
        why = f"the files in {where} have none" if where else "its own files are not on this machine"
        raise ValueError(
            f"drafter='mtp' needs the multi-token-prediction heads of {type(model).__name__}, but {why}; they are "
            "tensors called mtp.… or layers.N.eh_proj… among the model's. Load the model from its complete checkpoint"
        )
    layers, source = len(decoder(model).layers), own_files.tensors(names)
    try:
        return filled(model, renamed({str(_place(key, layers)): tensor for key, tensor in source.items()}))
    except ValueError as error:
        raise ValueError(f"the multi-token-prediction heads in {where}: {error}") from error


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of either layout under mmspec's names: layers.k.{enorm, hnorm, eh_proj, post_norm, mtp_block.…}."""
    bare = {key.removeprefix("mtp."): tensor for key, tensor in tensors.items()}
    numbers = sorted({int(key.split(".")[1]) for key in bare if re.match(r"layers\.\d+\.", key)})
    if numbers != list(range(len(numbers))) or not numbers:
        raise ValueError(f"their layers are numbered {numbers or 'not at all'}; the numbers should be consecutive")
    out: dict[str, Tensor] = {}
    for key, tensor in bare.items():
        name, _, kind = key.rpartition(".")
        if name in _SHARED:
            out.update({f"layers.{k}.{_SHARED[name]}.{kind}": tensor for k in numbers})
            continue
        _, number, *rest = key.split(".")
        part = ".".join(rest)
        if part.startswith(_OF_TARGET):
            continue
        mine = next((f"{ours}{part[len(theirs) :]}" for theirs, ours in _EACH.items() if part.startswith(theirs)), None)
        out[f"layers.{number}.{mine or f'mtp_block.{part}'}"] = tensor
    return out


def published(heads: MtpHeads) -> dict[str, Tensor]:
    """The tensors of one head under the names in a checkpoint of its model, `mtp.…`."""
    back = {ours: theirs for theirs, ours in _SHARED.items()}
    out: dict[str, Tensor] = {}
    for key, tensor in heads.state_dict().items():
        if not key.startswith("layers."):
            continue
        _, number, part, *rest = key.split(".")
        name = f"layers.{number}.{'.'.join(rest)}" if part == "mtp_block" else ".".join([back[part], *rest])
        out[f"mtp.{name}"] = tensor.detach().contiguous()
    return out


def save(model: GenerativeModel, heads: MtpHeads, folder: Path) -> None:
    """Write model.safetensors, with one head in the layout of the model's own checkpoint, and config.json.

    Raises:
        ValueError: loading the file would not give the same heads.
    """
    tensors = published(heads)
    again = filled(model, renamed(tensors)).state_dict()
    if len(heads.layers) != 1 or any(not torch.equal(again[k], t.to(again[k])) for k, t in heads.state_dict().items()):
        raise ValueError("only a single head, of a model whose checkpoint stores tensors unconverted, can be saved")
    marker = {"layout": "mtp", "method": "mtp", "version": __version__}
    write(folder, tensors, {"mmspec": marker, "target": origin(model)[0]})


def saved(folder: Path) -> bool:
    """Whether a folder was written by `save`.

    Raises:
        ValueError: a damaged config.json.
    """
    if not (folder / CONFIG).is_file():
        return False
    marker = read_config(folder).get("mmspec")
    return isinstance(marker, dict) and marker.get("method") == "mtp"


def save_trained(model: GenerativeModel, drafter: Any, folder: Path) -> None:
    """Save MTP heads in the format of the model's checkpoint, another drafter in mmspec's own."""
    if drafter.method == "mtp":
        save(model, drafter.heads, folder)
    else:
        save_drafter(drafter, folder)
