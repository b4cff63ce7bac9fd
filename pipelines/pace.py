"""What the loop asks for drafts: the drafter itself, or what the options `compile` and `auto` make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from mmspec.auto import Auto, Known
from mmspec.config import SpecConfig
from mmspec.drafters.captured import CapturedChain
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.ngram import NgramDrafter
from mmspec.pipelines import compiled, trusted
from mmspec.types import TargetInfo

# By model and by the drafter's layer, or its kind where it has no weights: what is known outlives `disable`.
_KNOWN: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Known]]] = WeakKeyDictionary()


def proposer(home: Any, model: Any, drafter: Any, config: SpecConfig, target: TargetInfo) -> Any:
    """What to iterate with.

    Raises:
        ValueError: `compile` or `auto` for a model or a drafter that knows nothing of it.
    """
    if not (config.compile or config.auto):
        return drafter
    if not hasattr(home.Enabled, "_mmspec_target"):
        if getattr(home, "COMPILES", False) and not config.auto:
            return drafter
        option = "auto" if config.auto else "compile"
        raise ValueError(f"{option} is not for {type(model).__name__}, which has a loop of its own; leave it out")
    if not config.auto:
        return _compiled(model, drafter, config)
    if not isinstance(drafter, FeatureDrafter | NgramDrafter):
        raise ValueError(f"auto chooses depths of chains and trees, which {type(drafter).__name__} does not draft")
    options = drafter.options if isinstance(drafter, FeatureDrafter) else drafter.config
    deepest = options.depth or drafter.nodes - 1
    fit: Any = drafter.fit
    depths = {0, deepest}
    if drafter.nodes == deepest + 1 and not config.compile:  # a chain; each compiled depth is another shape
        depths |= {-(-deepest // 4), -(-deepest // 2)}
    each = {d: drafter if d == deepest else fit(target, replace(config, depth=d, size=None))
            for d in sorted(depths) if d}  # fmt: skip
    ours = _KNOWN.setdefault(model, WeakKeyDictionary()).setdefault(getattr(drafter, "block", type(drafter)), {})
    known = ours.setdefault((target.device, config), Known(tuple(sorted(depths))))
    return Auto({d: _compiled(model, one, config) for d, one in each.items()}, known)


def _compiled(model: Any, drafter: Any, config: SpecConfig) -> Any:
    if not (config.compile and isinstance(drafter, FeatureDrafter)):
        return drafter
    if drafter.options.tree != "chain" or drafter.options.draws:
        return drafter
    chains = compiled.of(model).chains.setdefault(drafter.block, {})
    return CapturedChain(drafter, lambda: trusted.weights(model), chains)
