"""Captures and compiles the vision tower's forward, for pictures whose shape repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmspec.compile.capture import PiecewiseFunction, Uncapturable, compare
from mmspec.compile.capture_cache import CaptureCache, weights
from mmspec.compile.marks import PLAIN
from mmspec.compile.opaque import Structure, apart
from mmspec.functional import cut, sdpa
from mmspec.modes import computed_in, lasting
from mmspec.pipelines.host.forward import Decode, TowerTap, during
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.vision import tower
from mmspec.pipelines.target.captured_prompt import Shapes

_FEW = 2**16  # the most integers in an argument, such as the grids of pictures; their values are part of the shape


@dataclass
class _Tower:
    """The vision tower of one model."""

    own: nn.Module
    taps: Taps
    captures: CaptureCache  # for this model, with whose version they are valid
    shapes: Shapes[Structure] = field(default_factory=Shapes)


_OF: WeakKeyDictionary[GenerativeModel, _Tower] = WeakKeyDictionary()


@contextmanager
def encoding(model: GenerativeModel) -> Iterator[None]:
    """A context in which the model's vision tower reads pictures of a shape that repeats by a capture."""
    own = tower(model)
    if own is None:
        yield
        return
    if (mine := _OF.get(model)) is None or mine.own is not own:
        mine = _OF[model] = _Tower(own, Taps([(own, TowerTap, {})]), CaptureCache(type(own).__name__))
    mine.captures.check(model)  # a call reads the model's version once
    with mine.taps, during(encode=partial(_read, mine)):
        yield


def _read(mine: _Tower, run: Decode, *args: object, **kwargs: object) -> Any:
    """Return what `run` returns, from a capture if there is one; capture shapes that repeat."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if _real(leaf)]
    fixed = [leaf for leaf in leaves if not _real(leaf)]
    if not tensors or not all(map(_known, fixed)):
        return run(*args, **kwargs)
    values = tuple(_digest(leaf) if isinstance(leaf, Tensor) else leaf for leaf in fixed)
    key = ("tower", str(spec), values, *((t.shape, t.dtype, t.device) for t in leaves if isinstance(t, Tensor)))
    if (captured := mine.captures.existing(key)) is not None:
        return _replayed(mine.shapes.tried[key], captured, tensors)
    out = run(*args, **kwargs)
    if not mine.shapes.due(key) or mine.captures.failed(key):
        return out
    _, mine.shapes.tried[key] = apart(out)

    def build() -> PiecewiseFunction:
        if not all(map(_real, _tensors(out))):
            raise Uncapturable("it returns integers")
        with lasting():
            integers = _Integers([leaf.clone() for leaf in fixed if isinstance(leaf, Tensor)])
            rest = iter([*integers.fixed.values()])
            given = [leaf if _real(leaf) or not isinstance(leaf, Tensor) else next(rest) for leaf in leaves]

            def read(*inputs: Tensor) -> list[Tensor]:
                floats = iter(inputs)
                again, more = tree_unflatten([next(floats) if _real(leaf) else leaf for leaf in given], spec)
                with _Cut(), integers:
                    return _tensors(run(*again, **more))

            read(*tensors)
            integers.again = iter(integers.known)
            own = [*weights(mine.own), *integers.fixed.values()]
            captured = PiecewiseFunction(read, [t.clone() for t in tensors], own, graphed=False)
        compare(captured(_attend, *tensors), _tensors(out), computed_in(tensors[0].dtype, tensors[0].device))
        return captured

    mine.captures.get(key, build, quiet=True)
    return out


def _replayed(output: Structure, captured: PiecewiseFunction, tensors: Sequence[Tensor]) -> Any:
    return output.around(captured(_attend, *tensors))


def _digest(integers: Tensor) -> bytes:
    return sha256(integers.cpu().numpy().tobytes()).digest()


def _real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _known(leaf: object) -> bool:
    return leaf.numel() <= _FEW if isinstance(leaf, Tensor) else type(leaf) in PLAIN


def _tensors(output: object) -> list[Tensor]:
    tensors, _ = apart(output)
    return tensors


def _attend(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    return sdpa(q, k, v, seen, scale)


class _Cut(TorchFunctionMode):
    """Cuts a trace at attentions, so that layers of the same code share one piece."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = any(kwargs.get(name) for name in ("is_causal", "dropout_p", "enable_gqa"))
        if func is not F.scaled_dot_product_attention or len(args) != 3 or special or args[0].dim() != 4:
            return func(*args, **kwargs)
        q, k, v = args
        scale = kwargs.get("scale")
        return cut(0, q.shape[-1] ** -0.5 if scale is None else scale, q, k, v, kwargs.get("attn_mask"))


class _Integers(TorchFunctionMode):
    """Remembers what a forward computes from integers alone, and gives it again while the forward is traced, where it
    may be asked for its values: positions from the grids of pictures, and which patches are padding.

    Attributes:
        fixed: the integers, and all tensors that were computed from them, by `id`.
        known: the results of these functions, in their order.
        again: the results to give; None: they are remembered.
    """

    def __init__(self, integers: list[Tensor]) -> None:
        super().__init__()
        self.fixed, self.known = {id(t): t for t in integers}, list[object]()
        self.again: Iterator[object] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if not given or not all(id(t) in self.fixed for t in given):
            return func(*args, **kwargs)
        if self.again is not None:
            return next(self.again)
        result = func(*args, **kwargs)
        self.known.append(result)
        self.fixed |= {id(t): t for t in _tensors(result)}
        return result
