"""Finds forwards that read the value of a weight in Python, which would become a constant of a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = torch.ops.aten.index.Tensor
_READ = "it reads the value of a tensor, which may change"


class Uncapturable(Exception):
    """A function that cannot be captured; the message says why."""


@contextmanager
def unread(own: Iterable[Tensor]) -> Iterator[None]:
    """Raises Uncapturable if Python reads the value of one of these tensors, or of one that was computed from them: it
    would become a constant of the code."""
    with _Operations(own) as operations, _Lists(operations.knows):
        yield


class _Operations(TorchDispatchMode):
    """Finds the operations that read values, and what is computed from the tensors."""

    supports_higher_order_operators = True

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._of_own = WeakTensorKeyDictionary(dict.fromkeys(own, True))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        known = any(self.knows(t) for t in tree_leaves((args, kwargs)))
        if known and {*getattr(func, "tags", ())} & _READS and not (func is _INDEX and _whole(args[1])):
            raise Uncapturable(_READ)
        out = func(*args, **kwargs)
        for t in tree_leaves(out) if known else ():
            if isinstance(t, Tensor):
                self._of_own[t] = True
        return out

    def knows(self, t: object) -> bool:
        return isinstance(t, Tensor) and t in self._of_own


def _whole(indices: Iterable[Tensor | None]) -> bool:
    """Whether the shape of a selection does not depend on the values of its indices: these are no masks."""
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)


class _Lists(TorchFunctionMode):
    """Finds what turns tensors into lists and arrays, which is no operation of torch's."""

    def __init__(self, known: Callable[[object], bool]) -> None:
        self._known = known

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and self._known(args[0]):
            raise Uncapturable(_READ)
        return func(*args, **(kwargs or {}))
