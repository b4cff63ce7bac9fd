"""A model's own files on this machine: its folder, and the tensors in it that transformers does not load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspec.checkpoints.files import CONFIG, INDEX, WEIGHTS, index_of
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.names import origin


def folder(model: GenerativeModel) -> Path | None:
    """The folder that a model was loaded from, possibly in the hub's cache; None: it is not on this machine.

    Nothing is downloaded.
    """
    name, revision = origin(model)
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, CONFIG, revision=revision)
    except HFValidationError:  # not a valid hub name
        return None
    return Path(file).parent if isinstance(file, str) else None


def keys(where: Path) -> dict[str, Path]:
    """The names of all tensors in a folder, with the file of each; no tensor is read.

    Raises:
        ValueError: a damaged file or index.
    """
    if (where / INDEX).is_file():
        return {key: where / file for key, file in index_of(where).items()}
    alone = where / WEIGHTS
    if not alone.is_file():
        return {}
    with _opened(alone) as file:
        return dict.fromkeys(file.keys(), alone)


def tensors(files: dict[str, Path]) -> dict[str, Tensor]:
    """The tensors of these names, each from its file.

    Raises:
        FileNotFoundError: a file that the index lists is missing.
        ValueError: a damaged file, or one without a tensor that the index lists.
    """
    out: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        names = [key for key, at in files.items() if at == path]
        if not path.is_file():
            raise FileNotFoundError(f"{INDEX} lists {path.name}, which is missing in {path.parent}; download it")
        with _opened(path) as file:
            out |= {key: file.get_tensor(key) for key in names}
    return out


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is damaged or incomplete ({error}); download it again") from error
