"""Reading a drafter in any known layout from a folder, a file or the hub, with strict checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from mmspec.checkpoints import files, layouts, llama, weights
from mmspec.checkpoints.files import Settings
from mmspec.checkpoints.layout import Published
from mmspec.drafters.feature import FeatureDrafter
from mmspec.protocols import TargetInfo
from mmspec.registry import drafter_class

Sizes = TargetInfo | Callable[[str], int]


def load_drafter(
    name_or_path: str | Path, *, target: Sizes | None = None, revision: str | None = None, allow_pickle: bool = False,
    layout: str | None = None,
) -> FeatureDrafter:  # fmt: skip
    """A drafter from a folder, a file or the hub: see `pipelines.host.loading`, which finds the sizes of any target.

    Args:
        target: the TargetInfo of its target, or a function that returns the target's "layers" or "vocab".
    """
    path = files.locate(name_or_path, revision)
    try:
        config = files.read_config(path)
        tensors = files.read_tensors(path, allow_pickle)
        drafter = drafter_of(config, tensors, target=target, layout=layout)
    except ValueError as error:
        raise ValueError(f"{name_or_path}: {error}") from error
    return drafter


def drafter_of(
    config: Settings, tensors: dict[str, Tensor], *, target: Sizes | None = None, layout: str | None = None
) -> FeatureDrafter:
    """The same from the content of files, or from a third-party module: its config, and its tensors by name.

    Raises ValueError: as `load_drafter`.
    """
    try:
        name = layouts.detect(config, tensors) if layout is None else layout
        table = layouts.layout_named(name)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        info = target if callable(target) else partial(_of, target)
        contents = Published(config, layouts.opened(config), shapes, info)
        if table.keys:  # not our own names
            layouts.refuse(name, contents)
            table = table.over(llama.layers(contents.flat))
            weights.check_keys(table, tensors)
        cls = drafter_class(layouts.method_of(name, config))
        drafter = weights.build(table, tensors, cls, layouts.read(name, contents, cls.Config))
    except (TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError, MemoryError) as error:
        # unexpected settings or tensors that break the arithmetic of shapes
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"config.json and the tensors do not make a drafter ({reason}); fetch them again") from error
    return drafter.eval().requires_grad_(False)


def _of(target: TargetInfo | None, what: str) -> int | None:
    return None if target is None else int(getattr(target, what))
