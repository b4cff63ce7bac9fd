"""From what the user names to what the loop asks for drafts: a fitted drafter, captured, with a switch before it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mmspec.checkpoints.files import locate
from mmspec.checkpoints.load import drafter_of, load_drafter
from mmspec.compile.draft import CapturedDraft
from mmspec.compile.held import Held, weights
from mmspec.config import SpecConfig, option_names
from mmspec.drafters.adaptive import Adaptive, variants
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.heads import HeadsDrafter
from mmspec.pipelines.host import devices, hooks, loading
from mmspec.pipelines.target import captures
from mmspec.protocols import Compilable, TargetInfo
from mmspec.registry import DRAFTERS, USUAL, drafter_class
from mmspec.switch import Known, Switch

SWITCHED = True  # whether drafters without weights are turned off where nobody asks for it and they do not pay
_ASKED = ("features", "nodes", "fit", "start", "propose")  # of any drafter
# By model and by the drafter's layer, or its class where it has none: what is known outlives `disable`.
_KNOWN: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Known]]] = WeakKeyDictionary()


def named(drafter: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A drafter, where a model of transformers drafts, and the options that are left to say to it.

    Raises:
        ValueError: drafter="model" without the model, or something that cannot draft.
    """
    rest = dict(given)
    if drafter in ("model", "assistant"):
        if "draft" not in rest:
            raise ValueError(f"drafter={drafter!r} needs draft=…: a loaded model of transformers, or its folder")
        drafter = rest.pop("draft")
    elif not loading.is_model(drafter):
        return drafter, rest
    if loading.is_model(drafter) and not hasattr(drafter, "generate"):  # a network of a layout that we read
        return drafter_of(drafter.config.to_dict(), drafter.state_dict()), rest
    from mmspec.pipelines.drafters import assistant, draft_model
    from mmspec.pipelines.host.exotic import gemma4_assistant

    made = draft_model.ModelDrafter.of(drafter)
    kind = hooks.stock(made.model).__name__
    return (assistant.AssistantDrafter(made.model) if kind in gemma4_assistant.CLASSES else made), rest


def resolve(drafter: Any, given: Mapping[str, Any], target: TargetInfo, model: Any = None) -> Any:
    """A drafter fitted to the target: from None, a registered name, a folder, a hub name or an instance.

    Args:
        model: the target, for drafters that are made of it.
        given: the options that the user gave it, by name.

    Raises:
        ValueError: an unknown name, a name that needs weights, a drafter made for another target, or an option that
            it has no use for.
        TypeError: an option that no drafter has.
    """
    made = _made(USUAL if drafter is None else drafter, target, model)
    if isinstance(made, type):
        raise ValueError(f"drafter={made.__name__} is a class; pass a drafter made of it, as {made.__name__}()")
    if lacking := [name for name in _ASKED if not hasattr(made, name)]:
        raise ValueError(f"a drafter has {', '.join(_ASKED)}; {type(made).__name__} has no {', '.join(lacking)}")
    own = option_names(getattr(made, "options", None))
    others = [name for name in given if name not in own]
    if others and (unknown := set(others) - {name for one in DRAFTERS for name in _names(one)}):
        shared = option_names(SpecConfig)
        raise TypeError(f"unknown option {min(unknown)!r}; choose from {', '.join([*own, *shared])}")
    return made.fit(target, given)


def _made(drafter: Any, target: TargetInfo, model: Any) -> Any:
    """The drafter that is named; an instance names itself."""
    if not isinstance(drafter, (str, Path)):
        return drafter
    if isinstance(drafter, str) and drafter in DRAFTERS:
        if DRAFTERS[drafter].trained:
            raise ValueError(
                f"the drafter {drafter!r} needs weights; pass its folder or hub name, or train one with "
                f"`mmspec train --method {drafter} --target {target.name}`"
            )
        return drafter_class(drafter).of_model(model) if DRAFTERS[drafter].from_model else drafter_class(drafter)()
    if isinstance(drafter, str) and "/" not in drafter and not Path(drafter).exists():
        raise ValueError(
            f"unknown drafter {drafter!r}; choose from {', '.join(DRAFTERS)}, or pass a folder or owner/name on the hub"
        )
    return opened(Path(drafter), target, model) if Path(drafter).is_dir() else load_drafter(drafter, target=target)


def opened(folder: Path, target: TargetInfo, model: Any) -> Any:
    """The drafter in a folder: heads of the model's own classes, or a network of ours.

    Raises:
        FileNotFoundError, ValueError: it is neither; see `load_drafter`.
    """
    from mmspec.pipelines.drafters import mtp, mtp_files

    folder = locate(folder)
    if mtp_files.saved(folder):
        return mtp.MtpDrafter.of_model(model, folder)
    return load_drafter(folder, target=target)


def _names(name: str) -> list[str]:
    return option_names(getattr(drafter_class(name), "options", None))


# What was captured of heads, by their first layer, which all fitted copies share.
_HEADS: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()


def proposer(model: Any, drafter: Any, config: SpecConfig, target: TargetInfo, drafts: bool = True) -> Any:
    """The drafter, what it drafts captured with `compile`, and with `auto` behind a switch.

    Args:
        drafts: whether `compile` captures what the drafter does, too.

    Raises:
        ValueError: `auto` where several processes share a model.
    """
    if config.auto and devices.shared(model):
        raise ValueError(
            "auto times its rounds in each process by itself, and those that share this model's weights have to run "
            "alike; leave auto out, and choose depth, width and size"
        )
    compile = config.compile if drafts or isinstance(drafter, HeadsDrafter) else False
    if getattr(getattr(drafter, "options", None), "adaptive", False):
        depth, each = drafter.options.depth, variants(drafter)
        ready: Any = Adaptive({n: _captured(model, one, compile, target, depth) for n, one in each.items()})
    else:
        ready = _captured(model, drafter, compile, target)
    auto = config.auto if config.auto is not None else drafts and _costs_no_seed(model, drafter, config)
    return Switch(ready, _known(model, drafter, config, target)) if auto and drafter.nodes > 1 else ready


def _costs_no_seed(model: Any, drafter: Any, config: SpecConfig) -> bool:
    """Whether a drafter without weights may be turned off: what a seed draws does not depend on it."""
    lossless = config.rule == "exact" or getattr(config.rule, "lossless", False)
    return SWITCHED and lossless and getattr(drafter, "shares", False) and not devices.shared(model)


def _captured(model: Any, drafter: Any, compile: bool, target: TargetInfo, depth: int | None = None) -> Any:
    """What drafts as the drafter does, from captures of what it computes where that can be captured.

    Args:
        depth: see CapturedDraft.
    """
    if not compile:
        return drafter
    if isinstance(drafter, HeadsDrafter):
        return drafter.captured(_HEADS.setdefault(drafter.enter, Held(type(drafter).__name__)))
    if isinstance(drafter, Compilable):
        return drafter.compiled(compile)
    if not (isinstance(drafter, FeatureDrafter | BlockDrafter) and drafter.capturable):
        return drafter
    ours = captures.of(model)
    assert ours is not None
    held = ours.beside(drafter.block, type(drafter).__name__)
    alive = weakref.ref(model)  # what drafts for a model does not keep it
    return CapturedDraft(drafter, lambda: weights(alive()), target.vocab, held, depth)


def _known(model: Any, drafter: Any, config: SpecConfig, target: TargetInfo) -> Known:
    """Of this drafter with these options on this model; of a rule only its name tells how much it keeps."""
    layer = getattr(drafter, "block", None)
    how = repr(drafter) if layer is None else drafter.options  # of a drafter without weights all that it is made of
    key = (target, how, getattr(config.rule, "name", config.rule), config.reproducible, config.compile)
    ours = _KNOWN.setdefault(model, WeakKeyDictionary()).setdefault(type(drafter) if layer is None else layer, {})
    return ours.setdefault(key, Known())
