"""Functions that a capture calls as they are, such as the scans of recurrent layers.

Traced along, a scan would be hundreds of operations in each layer, or none where it launches kernels of its own. A
capture is cut at it instead, and may use a version of it that is compiled once for all layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mmspec.modes import ambient


class Structure:
    """Nested tuples, lists and dictionaries without their tensors.

    Attributes:
        constants: the values that are not tensors.
        kinds: shape, dtype and device of each tensor.
    """

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._leaves, self._spec = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.kinds = [(leaves[place].shape, leaves[place].dtype, leaves[place].device) for place in self._places]

    @property
    def key(self) -> Hashable:
        """Equal for values that differ in the contents of their tensors only."""
        return str(self._spec), *self._leaves, *self._places, *self.kinds

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The same value with these tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)


def apart(value: object) -> tuple[list[Tensor], Structure]:
    """The tensors of a value, and its structure."""
    leaves, spec = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Structure(leaves, spec)


class OpaqueCall:
    """A function, with arguments that differ from call to call in the contents of their tensors only."""

    def __init__(self, function: Callable[..., Any], given: Structure) -> None:
        self._function, self._given, self.number = function, given, next(_NUMBERS)
        kind = given.kinds[0][2].type
        self._cast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self.result: Structure = None  # type: ignore[assignment]  # known after the first call
        self.compiled: Callable[..., Sequence[Tensor]] | None = None  # takes and returns what `run` does
        _ALIVE[self.number] = self

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of the result, contiguous, for these tensors of the arguments."""
        if self.compiled is not None:
            return list(self.compiled(*tensors))
        args, kwargs = self._given.around(tensors)
        cast: AbstractContextManager[object] = nullcontext() if self._cast is None else torch.autocast(*self._cast)
        with cast:  # a replay turns autocast off
            found, self.result = apart(self._function(*args, **kwargs))
        return [t.contiguous() for t in found]

    def examples(self) -> list[Tensor]:
        """Tensors such as `run` takes."""
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._given.kinds]


class OpaqueCalls:
    """Calls functions such that a trace records each call as one operation; has an OpaqueCall for each kind of call."""

    def __init__(self) -> None:
        self.known: dict[Hashable, OpaqueCall] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors, given = apart((args, kwargs))
        key = (function, given.key, ambient())
        if key not in self.known:
            self.known[key] = OpaqueCall(function, given)
        call = self.known[key]
        outputs = opaque(call.number, [t.contiguous() for t in tensors])
        return call.result.around(outputs)  # its first run has told the structure of the result


_NUMBERS = count()
_ALIVE: WeakValueDictionary[int, OpaqueCall] = WeakValueDictionary()


@torch.library.custom_op("mmspec::opaque", mutates_args=())
def opaque(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """An opaque call in a trace."""
    return _ALIVE[number].run(*tensors)


_OPAQUE = torch.ops.mmspec.opaque.default


def is_opaque(node: fx.Node) -> bool:
    """Whether a node of a trace is an opaque call."""
    return node.target is _OPAQUE


def call_of(node: fx.Node) -> fx.Node | None:
    """The opaque call of whose results this node takes one."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and is_opaque(source) else None


def resolve(piece: fx.GraphModule) -> bool:
    """Let a piece that is an opaque call hold the OpaqueCall itself; False for other pieces."""
    for node in piece.graph.find_nodes(op="call_function", target=_OPAQUE):
        number, tensors = node.args
        node.target, node.args = _ALIVE[number].run, tuple(tensors)
        piece.recompile()
        return True
    return False
