"""What the loop asks for drafts: the drafter itself, or what the options `compile` and `auto` make of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from mmspec.auto import NONE, Auto, Known
from mmspec.config import SpecConfig
from mmspec.drafters.captured import CapturedDraft
from mmspec.drafters.feature import FeatureDrafter
from mmspec.pipelines import compiled, devices, trusted
from mmspec.pipelines.trusted import Trusted
from mmspec.types import TargetInfo

# By model and by the drafter's layer, or its class where it has none: what is known outlives `disable`.
_KNOWN: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Known]]] = WeakKeyDictionary()


def proposer(model: Any, drafter: Any, config: SpecConfig, target: TargetInfo, drafts: bool = True) -> Any:
    """The drafter, or with `auto` one that chooses between it, the same drafting less, and nothing.

    Args:
        drafts: whether `compile` captures what the drafter does, too.

    Raises:
        ValueError: `auto` for a drafter that cannot draft less, or where several processes share a model.
    """
    ready = partial(_ready, model, target, config.compile and drafts)
    if not config.auto:
        return ready(drafter)
    if devices.shared(model):
        raise ValueError(
            "auto times its rounds in each process by itself, and those that share this model's weights have to draft "
            "alike; leave auto out, and choose depth, width and size"
        )
    if not hasattr(drafter, "less"):
        raise ValueError(
            f"auto chooses how much is drafted, and {type(drafter).__name__} cannot be told to draft less; leave it out"
        )
    if drafter.nodes == NONE:
        return ready(drafter)
    less = (drafter.fit(target, replace(config, **options)) for options in drafter.less)
    each = {one.nodes: one for one in less if one.nodes < drafter.nodes} | {drafter.nodes: drafter}
    if config.compile:  # every shape would be captured
        each = {nodes: one for nodes, one in each.items() if nodes in (NONE, drafter.nodes)}
    return Auto(map(ready, each.values()), _known(model, drafter, config, target, each))


def _known(model: Any, drafter: Any, config: SpecConfig, target: TargetInfo, shapes: Iterable[int]) -> Known:
    """Of this drafter with these options on this model; of a rule only its name tells how much it keeps."""
    key = replace(config, rule=getattr(config.rule, "name", config.rule), budget=None, on_unsupported="error")
    layer = getattr(drafter, "block", None)
    settings = repr(drafter.fit(target, key)) if layer is None else ""  # of a drafter without weights
    ours = _KNOWN.setdefault(model, WeakKeyDictionary()).setdefault(type(drafter) if layer is None else layer, {})
    return ours.setdefault((target, key, settings), Known(sorted({NONE, *shapes}), getattr(drafter, "settles", 0)))


def _ready(model: Any, target: TargetInfo, capture: bool, drafter: Any) -> Any:
    """The drafter, what it drafts captured where that is asked for."""
    if not capture or not isinstance(drafter, FeatureDrafter) or drafter.nodes == NONE:
        return drafter
    held = compiled.of(model).drafts.setdefault(drafter.block, Trusted(type(drafter).__name__))
    return CapturedDraft(drafter, lambda: trusted.weights(model), target.vocab, held)
