"""Reading a drafter in any known layout, strictly, from a folder, a file or the hub."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec.checkpoints import files, settings, weights
from mmspec.checkpoints.layouts import detect, layout_named
from mmspec.drafters.feature import FeatureDrafter
from mmspec.protocols import TargetInfo
from mmspec.registry import drafter_class


def load_drafter(
    name_or_path: str | Path,
    *,
    target: Any = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    layout: str | None = None,
) -> FeatureDrafter:
    """A drafter with its weights, frozen and in eval mode, in the types of the file; `enable` fits it to its target.

    Args:
        name_or_path: a folder, a file with config.json beside it, or owner/name on the hub.
        target: what it drafts for: a model, its TargetInfo, or its name or folder. Needed where the file does not say
            which layers it reads (EAGLE-3 as published). A name also replaces the one recorded in the file.
        revision: branch, tag or commit on the hub.
        allow_pickle: run the code that a .bin file asks for; only for files whose author you trust.
        layout: one of `layouts.LAYOUTS`; None: what config.json and the tensors' names show. An MSD drafter whose
            config.json was lost needs it: its tensors are those of an EAGLE drafter.

    Returns:
        The drafter; hand it to `enable(model, drafter=...)`, or use it several times.

    Raises:
        FileNotFoundError: nothing there, or no config.json or weights in it.
        ValueError: an unknown layout, missing, extra or misshapen tensors, a damaged file, a network we do not have.
    """
    path = files.locate(name_or_path, revision)
    try:
        config = files.read_config(path)
        tensors = files.read_tensors(path, allow_pickle)
        made = drafter_of(config, tensors, target=target, layout=layout)
    except ValueError as error:
        raise ValueError(f"{name_or_path}: {error}") from error
    if isinstance(target, (str, Path)):
        made.config = replace(made.config, target=str(target))
    return made


def drafter_of(
    config: dict[str, Any], tensors: dict[str, Tensor], *, target: Any = None, layout: str | None = None
) -> FeatureDrafter:
    """The same from what a file holds, or a module of somebody else: its config, and its tensors by name.

    Raises:
        ValueError: as `load_drafter`.
    """
    try:
        name = detect(config, tensors) if layout is None else layout
        table = layout_named(name)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        if table.keys:  # not our own names
            settings.refuse(name, config, shapes)
            table = table.over(settings.layers(config))
            weights.check_keys(table, tensors)
        made = drafter_class(settings.method_of(name, config))
        found = settings.read(name, config, shapes, partial(_of_target, target), made.Config)
        drafter = weights.build(table, tensors, made, found)
    except (TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError, MemoryError) as error:
        # what a setting or a tensor that nobody thought of does to the arithmetic of shapes
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"config.json and the tensors make no drafter ({reason}); fetch them again") from error
    return drafter.eval().requires_grad_(False)


def _of_target(target: Any, what: str) -> int | None:
    """A number of a target, "layers" of its decoder or its "vocab": of a TargetInfo, a model, or a name or folder."""
    if target is None:
        return None
    if isinstance(target, TargetInfo):
        return int(getattr(target, what))
    if isinstance(target, (str, Path)):
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError) as error:
            raise ValueError(f"the config of the target {str(target)!r} could not be read: {error}") from error
    else:
        config = getattr(target, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"target must be a model, or the name or folder of one; got a {type(target).__name__}")
    text = config.get_text_config(decoder=True)
    return int(text.num_hidden_layers if what == "layers" else text.vocab_size)
