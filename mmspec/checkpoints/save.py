"""Writing a drafter in a layout: safetensors, config.json and a model card, each file replaced atomically."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from reprlib import repr as briefly

from safetensors.torch import save_file
from torch import Tensor

from mmspec.checkpoints import layouts, weights
from mmspec.checkpoints.files import CONFIG, WEIGHTS, Settings
from mmspec.checkpoints.layout import Published
from mmspec.checkpoints.weights import TrainedDrafter
from mmspec.drafters.heads import HeadsConfig
from mmspec.drafters.trained import TrainedConfig
from mmspec.replacing import replaced

CARD = "README.md"
_CARD = """---
{base}library_name: mmspec
tags:
- speculative-decoding
- {method}
---

# {method} drafter for {target}

Drafts tokens for {target}{revision}; the target decides, so the output is what the target alone would generate.

```python
import mmspec

mmspec.enable(model, drafter="this folder or repository")
model.generate(...)  # as before
```

{drafts}

Layout of the files: {layout}. {shapes}
"""

_TREE = """| depth | width | size |
|---|---|---|
| {c.depth} | {c.width} | {c.size} |

These are the recommended depth (longest drafted path), width (branches per node) and size (nodes sent to the target at
once): the defaults of `enable`."""
_WINDOW = "It recommends a window of {c.window} positions, the default of `enable`."
_OURS = [
    re.compile(re.sub(r"\\{[\w.\\]+\\}", r"[^\\n]*\\n?", re.escape(_CARD.replace("{drafts}", how))))
    for how in (_TREE, _WINDOW)
]  # such a card, of whatever drafter


def save_drafter(drafter: TrainedDrafter, folder: str | Path, layout: str = "mmspec") -> None:
    """Write model.safetensors, config.json and, unless somebody has written one, a card.

    Args:
        drafter: one with weights.
        folder: created if needed; the files are replaced one by one, each atomically.
        layout: one of `layouts.LAYOUTS`.

    Raises:
        ValueError: an unknown layout, or one that cannot hold this drafter.
        TypeError: a drafter without weights.
    """
    table = layouts.layout_named(layout)
    if not hasattr(drafter, "state_dict"):
        raise TypeError(f"only a drafter with weights can be saved; a {type(drafter).__name__} has none")
    described = layouts.describe(layout, drafter.method, drafter.config)
    tensors = weights.split(table.over(getattr(drafter.config, "layers", 1)), drafter)
    if table.keys:
        assert isinstance(drafter.config, TrainedConfig)
        _check(layout, described, {key: tuple(tensor.shape) for key, tensor in tensors.items()}, drafter.config)
    write(folder := Path(folder), tensors, described)
    kept = folder / CARD
    if not kept.exists() or any(ours.fullmatch(kept.read_text(encoding="utf-8", errors="replace")) for ours in _OURS):
        with replaced(kept) as path:
            path.write_text(card(layout, drafter.method, drafter.config), encoding="utf-8")


def write(folder: Path, tensors: dict[str, Tensor], config: Settings) -> None:
    """Write model.safetensors and config.json to a folder, which is created if needed."""
    said = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / WEIGHTS) as path:
        path.touch()
        usual = path.stat().st_mode
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(usual)  # save_file's own is for the user alone
    with replaced(folder / CONFIG) as path:
        path.write_text(said, encoding="utf-8")


def push_drafter(
    drafter: TrainedDrafter, repo_id: str, *, layout: str = "mmspec", private: bool | None = None,
    revision: str | None = None, token: str | None = None, message: str = "Upload drafter",
) -> str:  # fmt: skip
    """Upload a drafter to the hub; an existing model card is not changed.

    Args:
        drafter: one with weights.
        repo_id: owner/name; created if needed.
        layout: one of `layouts.LAYOUTS`.
        private: whether a new repository is private.
        revision: branch to write to; None: the main one.
        token: hub token; None: the one that you logged in with.
        message: commit message.

    Returns:
        The repository's URL.

    Raises:
        ValueError: an unknown layout, or one that cannot hold this drafter.
        TypeError: a drafter without weights.
        huggingface_hub.errors.HfHubHTTPError: the hub returned an error.
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


def card(name: str, method: str, c: TrainedConfig | HeadsConfig) -> str:
    """README.md of a drafter in a layout."""
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", c.target) is not None and not c.target.startswith(".")
    rows = getattr(c, "draft_vocab", 0) or "no"
    return _CARD.format(
        base=f"base_model: {json.dumps(c.target)}\n" if on_hub else "",
        method=method,
        target=c.target or "a target that was not recorded",
        revision=f" (revision {c.target_revision})" if c.target_revision else "",
        layout=f"{name} ({layouts.layout_named(name).about})",
        shapes=f"Hidden size {c.hidden}, vocabulary {c.vocab}, {rows} rows of an own output head.",
        drafts=_WINDOW.format(c=c) if isinstance(c, HeadsConfig) else _TREE.format(c=c.shape),
    )


def _check(name: str, written: Settings, shapes: dict[str, tuple[int, ...]], config: TrainedConfig) -> None:
    """Check that the layout loses no setting: reading the written config must give the same config.

    Raises ValueError: lists the settings that would be lost.
    """
    sizes = {"vocab": config.vocab}
    try:
        config_read = layouts.read(name, Published(written, layouts.opened(written), shapes, sizes.get), type(config))
    except ValueError as error:
        raise ValueError(f"the layout {name!r} cannot hold this drafter: {error}. Use layout 'mmspec'") from error
    plain = {"head_dim": (0, config.hidden // config.heads), "target_hidden": (0, config.hidden)}  # 0 is the default
    lost, back = [], config_read.to_dict()
    for key, value in config.to_dict().items():
        read = back[key]
        alike = key in plain and {read, value} <= {*plain[key]}
        several = isinstance(read, tuple) and isinstance(value, tuple) and {*read} == {*value} and len({*read}) == 1
        if read != value and not alike and not several:
            lost.append(f"{key} is {briefly(value)}, and would be read as {briefly(read)}")
    if lost:
        raise ValueError(f"the layout {name!r} cannot hold this drafter: {'; '.join(lost)}. Use layout 'mmspec'")
