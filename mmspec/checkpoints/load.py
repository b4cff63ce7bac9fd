"""Reading a drafter in any known layout, strictly, from a folder, a file or the hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from mmspec.checkpoints import files, llama, settings, weights
from mmspec.checkpoints.files import Settings
from mmspec.checkpoints.layout import Published
from mmspec.checkpoints.layouts import detect, layout_named
from mmspec.drafters.feature import FeatureDrafter
from mmspec.protocols import TargetInfo
from mmspec.registry import drafter_class

Sizes = TargetInfo | Callable[[str], int]


def load_drafter(
    name_or_path: str | Path, *, target: Sizes | None = None, revision: str | None = None, allow_pickle: bool = False,
    layout: str | None = None,
) -> FeatureDrafter:  # fmt: skip
    """A drafter from a folder, a file or the hub: see `pipelines.host.loading`, which knows the sizes of any target.

    Args:
        target: the TargetInfo of what it drafts for, or what gives a number of it: "layers" of its decoder or "vocab".
    """
    path = files.locate(name_or_path, revision)
    try:
        config = files.read_config(path)
        tensors = files.read_tensors(path, allow_pickle)
        made = drafter_of(config, tensors, target=target, layout=layout)
    except ValueError as error:
        raise ValueError(f"{name_or_path}: {error}") from error
    return made


def drafter_of(
    config: Settings, tensors: dict[str, Tensor], *, target: Sizes | None = None, layout: str | None = None
) -> FeatureDrafter:
    """The same from what a file holds, or a module of somebody else: its config, and its tensors by name.

    Raises:
        ValueError: as `load_drafter`.
    """
    try:
        name = detect(config, tensors) if layout is None else layout
        table = layout_named(name)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        info = target if callable(target) else partial(_of, target)
        contents = Published(config, settings.opened(config), shapes, info)
        if table.keys:  # not our own names
            settings.refuse(name, contents)
            table = table.over(llama.layers(contents.flat))
            weights.check_keys(table, tensors)
        made = drafter_class(settings.method_of(name, config))
        drafter = weights.build(table, tensors, made, settings.read(name, contents, made.Config))
    except (TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError, MemoryError) as error:
        # what a setting or a tensor that nobody thought of does to the arithmetic of shapes
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"config.json and the tensors make no drafter ({reason}); fetch them again") from error
    return drafter.eval().requires_grad_(False)


def _of(target: TargetInfo | None, what: str) -> int | None:
    return None if target is None else int(getattr(target, what))
