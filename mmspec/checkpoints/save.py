"""Writing a drafter in a layout: safetensors only, each file replaced in one step, a card beside them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as briefly

from safetensors.torch import save_file

from mmspec.checkpoints import settings, weights
from mmspec.checkpoints.card import card
from mmspec.checkpoints.files import CONFIG, WEIGHTS, Settings
from mmspec.checkpoints.layout import Published
from mmspec.checkpoints.layouts import layout_named
from mmspec.checkpoints.weights import TrainedDrafter
from mmspec.drafters.trained import TrainedConfig

CARD = "README.md"


def save_drafter(drafter: TrainedDrafter, folder: str | Path, layout: str = "mmspec") -> None:
    """Write model.safetensors, config.json and, unless there is one, a card.

    Args:
        drafter: one with weights.
        folder: made if need be; the files are replaced one by one, each in one step.
        layout: one of `layouts.LAYOUTS`.

    Raises:
        ValueError: an unknown layout, or one that cannot hold this drafter.
        TypeError: a drafter without weights.
    """
    table = layout_named(layout)
    if not hasattr(drafter, "state_dict"):
        raise TypeError(f"only a drafter with weights can be saved; a {type(drafter).__name__} has none")
    said = settings.describe(layout, drafter.method, drafter.config)
    config = json.dumps(said, indent=2) + "\n"
    tensors = weights.split(table.over(getattr(drafter.config, "layers", 1)), drafter)
    if table.keys:
        assert isinstance(drafter.config, TrainedConfig)
        _check(layout, said, {key: tuple(tensor.shape) for key, tensor in tensors.items()}, drafter.config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _replace(folder / CONFIG, lambda path: path.write_text(config, encoding="utf-8"))
    if not (folder / CARD).exists():
        text = card(layout, drafter.method, drafter.config)
        _replace(folder / CARD, lambda path: path.write_text(text, encoding="utf-8"))


def push_drafter(
    drafter: TrainedDrafter, repo_id: str, *, layout: str = "mmspec", private: bool | None = None,
    revision: str | None = None, token: str | None = None, message: str = "Upload drafter",
) -> str:  # fmt: skip
    """Upload a drafter to the hub; an existing card is left alone.

    Args:
        drafter: one with weights.
        repo_id: owner/name; made if need be.
        layout: one of `layouts.LAYOUTS`.
        private: of a repository that is made now.
        revision: branch to write to; None: the main one.
        token: of the hub; None: the one that you logged in with.
        message: of the commit.

    Returns:
        The repository's address.

    Raises:
        ValueError: an unknown layout, or one that cannot hold this drafter.
        TypeError: a drafter without weights.
        huggingface_hub.errors.HfHubHTTPError: the hub refused.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(drafter, folder, layout)
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        has_card = api.file_exists(repo_id, CARD, revision=revision)
        kept = [CARD] if has_card else None
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message, ignore_patterns=kept
        )
    return str(address)


def _check(name: str, said: Settings, shapes: dict[str, tuple[int, ...]], config: TrainedConfig) -> None:
    """Refuse a layout that would lose a setting: what it writes has to be read as it was.

    Raises:
        ValueError: with what would be lost.
    """
    known = {"vocab": config.vocab}
    try:
        config_read = settings.read(name, Published(said, settings.opened(said), shapes, known.get), type(config))
    except ValueError as error:
        raise ValueError(f"the layout {name!r} cannot hold this drafter: {error}. Use layout 'mmspec'") from error
    plain = {"head_dim": (0, config.hidden // config.heads), "target_hidden": (0, config.hidden)}  # 0: this very one
    lost, back = [], config_read.to_dict()
    for key, value in config.to_dict().items():
        read = back[key]
        alike = key in plain and {read, value} <= {*plain[key]}
        several = isinstance(read, tuple) and isinstance(value, tuple) and {*read} == {*value} and len({*read}) == 1
        if read != value and not alike and not several:
            lost.append(f"{key} is {briefly(value)}, and would be read as {briefly(read)}")
    if lost:
        raise ValueError(f"the layout {name!r} cannot hold this drafter: {'; '.join(lost)}. Use layout 'mmspec'")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file, then put it in its place, so that nobody ever reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
