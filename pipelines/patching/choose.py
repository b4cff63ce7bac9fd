"""Chooses the drafter, from the user's `drafter=` or from what the model ships with, and fits it to the model."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.checkpoints.files import CONFIG, locate, read_config
from mmspec.checkpoints.load import drafter_of, load_drafter
from mmspec.config import Options, SpecConfig, option_names
from mmspec.drafters.own_options import options_of
from mmspec.drafters.shape import Shape
from mmspec.pipelines.drafters import own_files
from mmspec.pipelines.host import hooks, loading, wrappers
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.names import own_setting
from mmspec.protocols import TargetInfo
from mmspec.registry import DRAFTERS, PUBLISHED, USUAL, drafter_class

FOLDERS = ("drafter", "mtp", "dflash", "eagle", "eagle3", "assistant", "speculator")  # beside a model's own files
_NEEDED = ("features", "nodes", "fit", "start", "propose")  # attributes of every drafter
_log = logging.getLogger("mmspec")


def chosen(drafter: Any, given: Options, target: TargetInfo, model: GenerativeModel) -> tuple[Any, dict[str, Any]]:
    """A drafter fitted to the target, and its options (without `draft`).

    Args:
        drafter: a registered name, a folder, a hub name, an instance, a draft model, or None for what the model ships
            with.
        given: the user's options, by name.
        model: the target model, for drafters that are built from it.

    Raises:
        ValueError: an unknown name, a name that needs weights, a drafter made for another target, or an option that
            this drafter does not use.
        TypeError: an option that no drafter has.
    """
    named, rest = _instance(drafter, given)
    built = _built(_shipped(model, target) if named is None else named, target, model)
    if drafter is None or isinstance(drafter, (str, Path)):
        rest = _flat(built, rest, target)
    if isinstance(built, type):
        raise ValueError(f"drafter={built.__name__} is a class; pass an instance of it, as {built.__name__}()")
    if lacking := [name for name in _NEEDED if not hasattr(built, name)]:
        raise ValueError(f"a drafter has {', '.join(_NEEDED)}; {type(built).__name__} has no {', '.join(lacking)}")
    own = option_names(getattr(built, "options", None))
    others = {name for name in rest if name not in own}
    if others and (unknown := others - options_of(None).keys()):
        shared = option_names(SpecConfig)
        raise TypeError(f"unknown option {min(unknown)!r}; choose from {', '.join([*own, *shared])}")
    return built.fit(target, rest), rest


def _flat(drafter: Any, given: dict[str, Any], target: TargetInfo) -> dict[str, Any]:
    """The options with width=1 if the drafter's file recommends a tree and the model runs on a CPU, where every node
    takes time; not if the user said anything about the shape but its depth."""
    recommended = getattr(getattr(drafter, "config", None), "shape", None)
    if target.device.type != "cpu" or not isinstance(recommended, Shape) or recommended.branches == 1:
        return given
    said = any(given.get(name) is not None for name in ("width", "size", "tree", "draws"))
    return given if said else {**given, "width": 1}


def _instance(drafter: Any, given: Options) -> tuple[Any, dict[str, Any]]:
    """The drafter, built from a draft model if one was passed, else unchanged; and the options without `draft`.

    Raises:
        ValueError: drafter="model" without `draft`, or a draft model that cannot draft.
    """
    rest = dict(given)
    if drafter in ("model", "assistant"):
        if "draft" not in rest:
            raise ValueError(f"drafter={drafter!r} needs draft=…: a loaded model of transformers, or its folder")
        drafter = rest.pop("draft")
    elif not (loading.is_model(drafter) or (hasattr(drafter, "generate") and hasattr(drafter, "config"))):
        return drafter, rest  # a model may be wrapped by PEFT or torch.compile
    if loading.is_model(drafter) and not hasattr(drafter, "generate"):  # a network in a published layout
        return drafter_of(drafter.config.to_dict(), drafter.state_dict()), rest
    from mmspec.pipelines.drafters import assistant, draft_model
    from mmspec.pipelines.host.exotic import gemma4_assistant

    if isinstance(drafter, str | Path):
        drafter = loading.draft_model(drafter)
    if not hasattr(drafter, "generate") or not hasattr(drafter, "config"):
        raise ValueError(f"a draft model is a model of transformers, or its folder; got {type(drafter).__name__}")
    smaller = wrappers.unwrap(drafter)  # if its `generate` delegates to a component, that component
    assists = hooks.stock(smaller).__name__ in gemma4_assistant.CLASSES
    return (assistant.AssistantDrafter(smaller) if assists else draft_model.ModelDrafter(smaller)), rest


def _built(drafter: Any, target: TargetInfo, model: GenerativeModel) -> Any:
    """The drafter of this name, folder or hub name; an instance is returned unchanged."""
    if not isinstance(drafter, (str, Path)):
        return drafter
    if isinstance(drafter, str) and drafter in DRAFTERS:
        if DRAFTERS[drafter].trained:
            raise ValueError(
                f"the drafter {drafter!r} needs weights; pass its folder or hub name, or train one with "
                f"`mmspec train --method {drafter} --target {target.name}`"
            )
        return _heads(model, target) if DRAFTERS[drafter].from_model else drafter_class(drafter)()
    if drafter in zoo.DRAFTERS and not Path(drafter).exists():
        drafter = zoo.path(str(drafter))
    if isinstance(drafter, str) and "/" not in drafter and not Path(drafter).exists():
        raise ValueError(
            f"unknown drafter {drafter!r}; choose from {', '.join(DRAFTERS)}, or pass a folder or owner/name on the hub"
        )
    return _loaded(Path(drafter), target, model) if Path(drafter).is_dir() else load_drafter(drafter, target=target)


def _loaded(folder: Path, target: TargetInfo, model: GenerativeModel) -> Any:
    """The drafter in a folder: MTP heads of the model's own classes, or one of mmspec's networks.

    Raises:
        FileNotFoundError, ValueError: it is neither; see `load_drafter`.
    """
    from mmspec.pipelines.drafters import mtp_files

    folder = locate(folder)
    return _heads(model, target, folder) if mtp_files.saved(folder) else load_drafter(folder, target=target)


def _shipped(model: GenerativeModel, target: TargetInfo) -> Any:
    """The default drafter of `enable`: what the model ships with, else the registry's USUAL.

    One log line says which, and why, and names the published drafter for this model if there is one. Nothing is
    downloaded.
    """
    where, name = own_files.folder(model), target.name
    for folder in _folders(model, where):
        try:
            drafter = _in_folder(folder, target, model)
        except (ValueError, OSError) as error:
            _log.warning("mmspec does not use the drafter in %s: %s", folder, error)
            continue
        _log.info("mmspec drafts for %s with the drafter in %s", name, folder)
        return drafter
    if where is not None:
        from mmspec.pipelines.drafters import mtp_files

        try:
            drafter = _heads(model, target) if mtp_files.found(model) else None
        except (ValueError, OSError) as error:
            _log.warning("mmspec does not use the multi-token-prediction heads of %s: %s", name, error)
            drafter = None
        if drafter is not None:
            _log.info("mmspec drafts for %s with the multi-token-prediction heads in its own files", name)
            return drafter
    _log_fallback(name)
    return USUAL


def _folders(model: GenerativeModel, where: Path | None) -> list[Path]:
    """Folders that may contain a drafter: first the one that the model's config names, then those with usual names."""
    if where is None:
        return []
    named = own_setting(model, "drafter")
    names = [named] if isinstance(named, str) else []
    inside = (path for path in map(Path, (*names, *FOLDERS)) if not path.is_absolute() and ".." not in path.parts)
    return [where / path for path in inside if (where / path / CONFIG).is_file()]


def _in_folder(folder: Path, target: TargetInfo, model: GenerativeModel) -> Any:
    """The drafter in a folder, in a layout that mmspec reads, or a draft model of transformers.

    Raises:
        ValueError, OSError: it is neither.
    """
    kinds = read_config(folder).get("architectures")
    if loading.generates(kinds if isinstance(kinds, list) else []):
        return _instance("model", {"draft": folder})[0].fit(target, {})
    return _loaded(folder, target, model).fit(target, {})


def _heads(model: GenerativeModel, target: TargetInfo, folder: Path | None = None) -> Any:
    """The multi-token-prediction heads in the model's own files, or in a folder. ValueError: there are none, or the
    model draws pictures."""
    from mmspec.pipelines.drafters.mtp import MtpDrafter

    if target.ends is None:
        raise ValueError(f"'mtp' drafts text, and {target.name} draws pictures; use 'jacobi', which needs no weights")
    return MtpDrafter.of_model(model, folder)


@lru_cache(maxsize=256)
def _log_fallback(name: str) -> None:
    """Log, once for each model name, that the default drafter is used."""
    base = name.rstrip("/").rpartition("/")[2].lower()
    published = PUBLISHED.get(base)
    if published is None:
        _log.info("mmspec drafts for %s with %r: it ships with no drafter, and mmspec knows of none", name, USUAL)
    else:
        _log.warning(
            "mmspec drafts for %s with %r; a drafter for it is published: mmspec.enable(model, drafter=%r)",
            name, USUAL, published,
        )  # fmt: skip
