"""The decoder's part of a prefill, captured and compiled for prompts of a shape that comes up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmspec.compile import capture
from mmspec.compile.capture import PiecewiseFunction, Uncapturable
from mmspec.compile.capture_cache import compare, weights
from mmspec.compile.version import PLAIN, version
from mmspec.functional import LayerAttention, sdpa
from mmspec.modes import computed_in, lasting
from mmspec.pipelines.host.cache import PassThroughCache, RaggedCache
from mmspec.pipelines.host.call import BOTH_WAYS
from mmspec.pipelines.host.forward import Decode, now, reading
from mmspec.pipelines.host.names import CACHE, FEATURES
from mmspec.pipelines.target import masks
from mmspec.pipelines.target.captures import Forward, capturable
from mmspec.types import FINAL

MOST = 4  # shapes of prompts that are captured of a model
AGAIN, OFTEN = 2, 4  # times in a row, or in all, that a shape has come up when it is captured: chats seldom repeat one
_MASK = "attention_mask"


@dataclass
class _Shapes:
    """What is known of the prompts of one model."""

    seen: Counter[Hashable] = field(default_factory=Counter)
    last: Hashable = None  # the shape that came up last, and how often in a row
    row: int = 0
    tried: dict[Hashable, type] = field(default_factory=dict)  # the class of what the decoder gives


_OF: WeakKeyDictionary[Forward, _Shapes] = WeakKeyDictionary()


def reader(target: Any, slots: RaggedCache, valid: Tensor) -> Decode | None:
    """What is called in a prefill in the place of the decoder, with the decoder's own call before its arguments.

    None: the decoder reads by itself, such as prompts with padding, or what follows a text that is cached.

    Args:
        target: of an enabled model.
        slots: the cache that the prompt goes into.
        valid: bool [B, L], false on padding.
    """
    apart = target.by_tree or target.shares or target.instead is not None
    if not target.compiles_prompts or apart or slots.lengths.longest or not target.masks.causal(valid.shape[1]):
        return None
    return partial(_read, target, slots) if bool(valid.all()) else None


def _read(target: Any, slots: RaggedCache, run: Callable[..., Any], *args: object, **kwargs: Any) -> Any:
    """As `run`: from a capture where there is one, else by itself; of a shape that is seen again a capture is made."""
    given = {name: value for name, value in kwargs.items() if name not in (CACHE, _MASK)}
    leaves, spec = tree_flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    if args or kwargs.get(CACHE) is not slots or not _causal(kwargs) or not PLAIN.issuperset(map(type, constants)):
        return run(*args, **kwargs)
    shapes = tuple((t.shape, t.dtype, t.device) for t in tensors)
    key = ("prompt", type(target), target.features, str(spec), constants, shapes)
    held, known = target.captured, _OF.setdefault(target.captured, _Shapes())
    if (captured := held.existing(key)) is not None:
        return _replayed(target, slots, known.tried[key], captured, tensors)
    known.seen[key] += 1
    known.last, known.row = key, known.row + 1 if key == known.last else 1
    full = key not in known.tried and len(known.tried) == MOST
    if (known.row < AGAIN and known.seen[key] < OFTEN) or full or held.failed(key):
        return run(**kwargs)
    before = version(target.model, kept=True)
    out = run(**kwargs)
    known.tried[key] = type(out)

    def made() -> PiecewiseFunction:
        capturable(target)
        if version(target.model, kept=True) != before:
            raise Uncapturable("its forward changes what its modules hold")
        if {name for name, value in out.items() if value is not None} != {FEATURES, CACHE}:
            raise Uncapturable("it gives more than its final features")
        return _checked(target, slots, partial(run, **kwargs), given, out[FEATURES])

    held.get(key, made, quiet=True)
    return out


def _replayed(
    target: Any, slots: RaggedCache, kind: type, captured: PiecewiseFunction, tensors: list[Tensor]
) -> object:
    """What the decoder would give, of this class, its layers' inputs noted."""
    hidden, *features = captured(_attending(slots), *tensors)
    if (read := now().read) is not None:
        read.layers.update(zip(_layers(target), features, strict=True))
    return kind(**{FEATURES: hidden, CACHE: slots})


def _checked(
    target: Any, slots: RaggedCache, run: Callable[..., Any], given: dict[str, Any], final: Tensor
) -> PiecewiseFunction:
    """The decoder's call, captured, if it gives `final` and the keys and values that `slots` hold now."""
    leaves, spec = tree_flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    B, L, _ = final.shape

    def read(*inputs: Tensor) -> list[Tensor]:
        rest, cache = iter(inputs), PassThroughCache(0)
        now = tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        seen = torch.ones(B, 1, L, L, dtype=torch.bool)
        mask = dict.fromkeys(masks.KINDS, seen) if target.mixed else seen
        with capture.Cut(cache, masked=True), reading() as read:
            out = run(**now, **{CACHE: cache, _MASK: mask})
        return [out[FEATURES], *(read.layers[i] for i in _layers(target))]

    with lasting():
        captured = PiecewiseFunction(read, [t.clone() for t in tensors], weights(target.model), graphed=False)
    scratch = RaggedCache(B, final.device, L)
    hidden = captured(_attending(scratch), *tensors)[0]
    mine, theirs = (
        [t[:, :, :L] for held in cache.slots for t in (held.keys, held.values) if t is not None]
        for cache in (scratch, slots)
    )
    compare([hidden, *mine], [final, *theirs], computed_in(final.dtype, final.device))
    return captured


def _layers(target: Any) -> list[int]:
    """The layers whose input the drafter reads."""
    return [i for i in target.features if i != FINAL]


def _attending(slots: RaggedCache) -> LayerAttention:
    def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = slots.update(k, v, layer)
        return sdpa(q, keys, values, scale=scale, causal=True)

    return attend


def _causal(arguments: dict[str, Any]) -> bool:
    """Whether a decoder that is called with these reads from left to right: any mask knows of padding alone."""
    mask = arguments.get(_MASK)
    return (mask is None or mask.dim() == 2) and all(arguments.get(name) is None for name in BOTH_WAYS)
