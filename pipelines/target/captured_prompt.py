"""Captures and compiles the decoder's forward in a prefill, for prompt shapes that repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmspec.compile import capture
from mmspec.compile.capture import PiecewiseFunction, Uncapturable, compare
from mmspec.compile.capture_cache import weights
from mmspec.compile.marks import PLAIN
from mmspec.compile.opaque import OpaqueCalls, apart
from mmspec.compile.version import version
from mmspec.functional import LayerAttention, sdpa
from mmspec.modes import computed_in, lasting
from mmspec.pipelines.host.cache import PassThroughCache, RaggedCache
from mmspec.pipelines.host.call import BOTH_WAYS
from mmspec.pipelines.host.forward import Decode, during, now, reading
from mmspec.pipelines.host.names import CACHE, FEATURES
from mmspec.pipelines.host.recurrent_state import RecurrentLayers
from mmspec.pipelines.target.captures import Forward, require_capturable, same_mask
from mmspec.types import FINAL

MOST = 4  # the maximum number of shapes that are captured for one module
UNROLLED = 1024  # the maximum length for which scans of recurrent layers are compiled: their loops are unrolled
AGAIN, OFTEN = 2, 4  # a shape is captured once seen so often in a row, or in all; chats seldom repeat a shape
REMEMBERED = 256  # number of shapes after which counting begins anew, so that the counts take little memory
_MASK = "attention_mask"


@dataclass
class _Output:
    """What a capture of one shape gives."""

    kind: type  # the class of the decoder's output
    recurrent: RecurrentLayers  # the layers with a recurrent state; their tensors are empty


T = TypeVar("T")


@dataclass
class Shapes(Generic[T]):
    """The shapes that one module has read."""

    seen: Counter[Hashable] = field(default_factory=Counter)
    last: Hashable = None  # the most recent shape
    row: int = 0  # how often in a row it was seen
    tried: dict[Hashable, T] = field(default_factory=dict)  # shape → what a capture of it gives

    def due(self, key: Hashable) -> bool:
        """Count a shape; whether it comes so often that it should be captured."""
        if key not in self.seen and len(self.seen) >= REMEMBERED:
            self.seen.clear()
        self.seen[key] += 1
        self.last, self.row = key, self.row + 1 if key == self.last else 1
        often = self.row >= AGAIN or self.seen[key] >= OFTEN
        return often and (key in self.tried or len(self.tried) < MOST)


_OF: WeakKeyDictionary[Forward, Shapes[_Output]] = WeakKeyDictionary()


def reader(target: Any, slots: RaggedCache, valid: Tensor) -> Decode | None:
    """A function that replaces the decoder's forward in a prefill; it takes the original forward before its arguments.

    None: the decoder runs by itself, for example for prompts with padding or on a filled cache.

    Args:
        target: of an enabled model.
        slots: the cache that the prompt goes into.
        valid: bool [B, L], false on padding.
    """
    length = valid.shape[1]
    special = target.stateful or target.shares or target.draft_attention is not None
    if not target.compiles_prompts or special or slots.lengths.longest or not target.masks.causal(length):
        return None
    return partial(_read, target, slots) if bool(valid.all()) else None


def _read(target: Any, slots: RaggedCache, run: Callable[..., Any], *args: object, **kwargs: Any) -> Any:
    """Return what `run` returns, from a capture if there is one; capture shapes that repeat."""
    given = {name: value for name, value in kwargs.items() if name not in (CACHE, _MASK)}
    tensors, structure = apart(given)
    plain = PLAIN.issuperset(map(type, structure.constants))
    if args or kwargs.get(CACHE) is not slots or not _causal(kwargs) or not plain:
        return run(*args, **kwargs)
    key = ("prompt", type(target), target.features, structure.key)
    cached, history = target.captured, _OF.setdefault(target.captured, Shapes())
    if (captured := cached.existing(key)) is not None:
        return _replayed(target, slots, history.tried[key], captured, tensors)
    if not history.due(key) or cached.failed(key):
        return run(**kwargs)
    before = version(target.model, kept=True)
    out = run(**kwargs)
    shapeless = ((index, layer.before(repeat(torch.empty(0)))) for index, layer in slots.recurrent.items())
    history.tried[key] = _Output(type(out), RecurrentLayers(shapeless))

    def build() -> PiecewiseFunction:
        require_capturable(target)
        if version(target.model, kept=True) != before:
            raise Uncapturable("its forward changes attributes of its modules")
        if {name for name, value in out.items() if value is not None} != {FEATURES, CACHE}:
            raise Uncapturable("it returns more than its final features")
        return _checked(target, slots, partial(run, **kwargs), given, out[FEATURES])

    cached.get(key, build, quiet=True)
    return out


def _replayed(
    target: Any, slots: RaggedCache, output: _Output, captured: PiecewiseFunction, tensors: list[Tensor]
) -> object:
    """The decoder's output from a capture; also records the features for the drafter, and the recurrent states."""
    hidden, *rest = captured(_attending(slots), *tensors)
    layers, outputs = _layers(target), iter(rest)
    features = dict(zip(layers, outputs, strict=False))
    if (read := now().read) is not None:
        read.layers.update(features)
    states = RecurrentLayers((index, layer.before(outputs)) for index, layer in output.recurrent.items())
    slots.recurrent = states.copied(slice(None))
    return output.kind(**{FEATURES: hidden, CACHE: slots})


def _checked(
    target: Any, slots: RaggedCache, run: Callable[..., Any], given: dict[str, Any], final: Tensor
) -> PiecewiseFunction:
    """The captured decoder call, after a check that it gives `final` and the keys and values that `slots` hold now."""
    tensors, structure = apart(given)
    B, L, _ = final.shape
    scans = OpaqueCalls()

    def read(*inputs: Tensor) -> list[Tensor]:
        cache = PassThroughCache(0)
        seen = torch.ones(B, 1, L, L, dtype=torch.bool)
        with capture.Cut(cache, masked=True), during(scan=scans), reading() as read:
            out = run(**structure.around(inputs), **{CACHE: cache, _MASK: same_mask(target, seen)})
        states = (t for layer in cache.recurrent.values() for t in layer.held())
        return [out[FEATURES], *(read.layers[i] for i in _layers(target)), *states]

    with lasting():
        captured = PiecewiseFunction(read, [t.clone() for t in tensors], weights(target.model), graphed=False)
    if final.device.type == "cpu" and L <= UNROLLED:
        for scan in scans.known.values():
            scan.compiled = partial(PiecewiseFunction(scan.run, scan.examples(), (), graphed=False), sdpa)
    scratch = RaggedCache(B, final.device, L)
    hidden, *rest = captured(_attending(scratch), *tensors)
    mine, theirs = (
        [t[:, :, :L] for held in cache.slots for t in (held.keys, held.values) if t is not None]
        for cache in (scratch, slots)
    )
    states = [t for layer in slots.recurrent.values() for t in layer.held()]
    mine = [hidden, *mine, *rest[len(_layers(target)) :]]
    compare(mine, [final, *theirs, *states], computed_in(final.dtype, final.device))
    return captured


def _layers(target: Any) -> list[int]:
    """The layers whose inputs the drafter reads."""
    return [i for i in target.features if i != FINAL]


def _attending(slots: RaggedCache) -> LayerAttention:
    def attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = slots.update(k, v, layer)
        return sdpa(q, keys, values, scale=scale, causal=True)

    return attend


def _causal(arguments: dict[str, Any]) -> bool:
    """Whether a decoder call with these arguments is causal: its mask, if any, marks only padding."""
    mask = arguments.get(_MASK)
    return (mask is None or mask.dim() == 2) and all(arguments.get(name) is None for name in BOTH_WAYS)
