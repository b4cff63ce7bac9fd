"""What a model ships with to draft for it: heads among its own tensors, or a drafter in a folder beside them."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmspec.checkpoints.files import CONFIG, read_config
from mmspec.pipelines.drafters import own_files
from mmspec.pipelines.host import loading
from mmspec.pipelines.host.names import own_setting
from mmspec.pipelines.patching import drafting
from mmspec.protocols import TargetInfo
from mmspec.registry import PUBLISHED, USUAL

FOLDERS = ("drafter", "mtp", "dflash", "eagle", "eagle3", "assistant", "speculator")  # beside a model's own files
_log = logging.getLogger("mmspec")


def drafter(model: Any, target: TargetInfo) -> Any:
    """What `enable` drafts with where nobody says: what the model ships with, else registry's USUAL.

    One line of the log says what, and why; where a drafter is published for this model, by which name. Nothing is
    downloaded.
    """
    where, name = own_files.folder(model), target.name
    for folder in _folders(model, where):
        try:
            found = _in_folder(folder, target, model)
        except (ValueError, OSError) as error:
            _log.warning("mmspec leaves the drafter in %s alone: %s", folder, error)
            continue
        _log.info("mmspec drafts for %s with the drafter in %s", name, folder)
        return found
    if where is not None:
        try:
            found = _heads(model)
        except (ValueError, OSError) as error:
            _log.warning("mmspec leaves the multi-token-prediction heads of %s alone: %s", name, error)
            found = None
        if found is not None:
            _log.info("mmspec drafts for %s with the multi-token-prediction heads in its own files", name)
            return found
    _fell_back(name)
    return USUAL


def _folders(model: Any, where: Path | None) -> list[Path]:
    """Folders that may hold a drafter: the one that the model's config names, then those of usual names."""
    if where is None:
        return []
    named = own_setting(model, "drafter")
    names = [named] if isinstance(named, str) else []
    inside = [
        Path(name) for name in (*names, *FOLDERS) if not Path(name).is_absolute() and ".." not in Path(name).parts
    ]
    return [where / name for name in inside if (where / name / CONFIG).is_file()]


def _in_folder(folder: Path, target: TargetInfo, model: Any) -> Any:
    """A drafter that mmspec reads, or a model of transformers that drafts.

    Raises:
        ValueError, OSError: it is neither.
    """
    kinds = read_config(folder).get("architectures")
    if loading.generates(kinds if isinstance(kinds, list) else []):
        return drafting.named("model", {"draft": folder})[0].fit(target, {})
    return drafting.opened(folder, target, model).fit(target, {})


def _heads(model: Any) -> Any:
    """The model's multi-token-prediction heads, or None."""
    from mmspec.pipelines.drafters import mtp, mtp_files

    return mtp.MtpDrafter.of_model(model) if mtp_files.found(model) else None


@lru_cache(maxsize=256)
def _fell_back(name: str) -> None:
    """Once for each model."""
    base = name.rstrip("/").rpartition("/")[2].lower()
    known = PUBLISHED.get(base)
    if known is None:
        _log.info("mmspec drafts for %s with %r: it ships with no drafter, and none is known here", name, USUAL)
    else:
        _log.warning(
            "mmspec drafts for %s with %r; a drafter for it is published: mmspec.enable(model, drafter=%r)",
            name, USUAL, known,
        )  # fmt: skip
