"""What the loop asks for drafts: the drafter itself, or what the options `compile` and `auto` make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from mmspec.auto import NONE, Auto, Known
from mmspec.config import SpecConfig
from mmspec.drafters.captured import CapturedChain
from mmspec.drafters.feature import FeatureDrafter
from mmspec.pipelines import compiled, trusted
from mmspec.types import TargetInfo

# By model and by the drafter's layer, or its kind where it has no weights: what is known outlives `disable`.
_KNOWN: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Known]]] = WeakKeyDictionary()


def proposer(home: Any, model: Any, drafter: Any, config: SpecConfig, target: TargetInfo) -> Any:
    """What to iterate with.

    Raises:
        ValueError: `auto` for a drafter that cannot draft less.
    """
    chains = config.compile and hasattr(home.Enabled, "_mmspec_target")  # a LlamaGenPipeline's forward alone
    return paced(model, drafter, config, target, partial(_compiled, model) if chains else _as_it_is)


def _as_it_is(drafter: Any) -> Any:
    return drafter


def paced(
    model: Any, drafter: Any, config: SpecConfig, target: TargetInfo, ready: Callable[[Any], Any] = _as_it_is
) -> Any:
    """The drafter, or with `auto` one that chooses between it, the same drafting less, and nothing.

    Args:
        ready: makes a drafter of any shape ready for use.

    Raises:
        ValueError: `auto` for a drafter that cannot draft less.
    """
    if not config.auto:
        return ready(drafter)
    if not hasattr(drafter, "less"):
        raise ValueError(
            f"auto chooses how much is drafted, and {type(drafter).__name__} cannot be told to draft less; leave it out"
        )
    if drafter.nodes == NONE:
        return ready(drafter)
    each = [*(drafter.fit(target, replace(config, **options)) for options in drafter.less), drafter]
    if config.compile:  # every shape would be captured
        each = [one for one in each if one.nodes in (NONE, drafter.nodes)]
    ours = _KNOWN.setdefault(model, WeakKeyDictionary()).setdefault(getattr(drafter, "block", type(drafter)), {})
    shapes = sorted({NONE, *(one.nodes for one in each)})
    known = ours.setdefault((target, config), Known(shapes, getattr(drafter, "settles", 0)))
    return Auto(map(ready, each), known)


def _compiled(model: Any, drafter: Any) -> Any:
    if not isinstance(drafter, FeatureDrafter) or drafter.options.tree != "chain" or drafter.options.draws:
        return drafter
    chains = compiled.of(model).chains.setdefault(drafter.block, {})
    return CapturedChain(drafter, lambda: trusted.weights(model), chains)
