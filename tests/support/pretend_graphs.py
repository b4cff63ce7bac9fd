"""CUDA graphs as they behave, on a CPU: a recording knows operations and addresses, and is played without any Python.

What is recorded is not computed. Memory of a recording's dead tensors is given out again, also to other recordings of
the same recorder. An operation that would have to wait for the device cannot be recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Gone(AssertionError):
    """A recording was played that uses memory which does not belong to it any more."""


def bare(t: Tensor) -> Tensor:
    """The same numbers at the same address; whose memory that is, is not a graph's to know."""
    count = _reach(t.shape, t.stride())
    if not count:
        return t.detach()
    memory = (ctypes.c_char * (count * t.dtype.itemsize)).from_address(t.data_ptr())
    return torch.frombuffer(memory, dtype=t.dtype, count=count).as_strided(t.shape, t.stride())


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


class Pool:
    """Memory of recordings: a block is given out again as soon as no tensor in it is left."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Any, StorageWeakRef]] = []

    def copy(self, t: Tensor) -> Tensor:
        count = _reach(t.shape, t.stride())
        if not count:
            return t
        need = count * t.dtype.itemsize
        free = [block for block, tenant in self.blocks if tenant.expired() and len(block) >= need]
        memory = min(free, key=len, default=None) or (ctypes.c_char * need)()
        mine = torch.frombuffer(memory, dtype=t.dtype, count=count).as_strided(t.shape, t.stride())
        others = [entry for entry in self.blocks if entry[0] is not memory]
        self.blocks = [*others, (memory, StorageWeakRef(mine.untyped_storage()))]
        return mine.copy_(t)

    def has(self, t: Tensor) -> bool:
        return any(not tenant.expired() and tenant == StorageWeakRef(t.untyped_storage()) for _, tenant in self.blocks)


class Taping(TorchDispatchMode):
    """Writes down what is called, and hands on results that lie in the pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []  # the last: where new results go
        self.lent: list[StorageWeakRef] = []  # what is used besides the pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs, places = kwargs or {}, list[Tensor | None]()
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in given}

        def placed(t: Tensor) -> Tensor:
            new = t.untyped_storage().data_ptr() not in known
            mine = self.pool.copy(t) if new else t
            places.append(bare(mine) if new else None)
            return mine

        self.lent += [StorageWeakRef(t.untyped_storage()) for t in given if t.numel() and not self.pool.has(t)]
        told = tree_map_only(Tensor, bare, (args, kwargs))
        out = tree_map_only(Tensor, placed, func(*args, **kwargs))
        if func._schema.is_mutable or any(place is not None for place in places):  # else it is a view: nothing to do
            self.calls.append((func, *told, places))
        return out


class Tape:
    """In the place of `graphs.Recorder`."""

    made, busy = 0, False  # recordings, by anybody; whether one is under way

    def __init__(self, device: torch.device) -> None:
        assert not Tape.busy, "it would wait for the device while somebody records"
        self.device, self.pool, self.whole = device, Pool(), True

    def follow(self) -> None:
        """All is computed at once here."""

    def rest(self) -> None:
        """Nothing is under way."""

    def __call__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        assert self.whole, "what a recording that broke off left behind must not be used"
        assert not Tape.busy, "two cannot record at a time"
        self.whole, Tape.busy = False, True
        try:
            with Taping(self.pool) as tape:
                outputs = list(function(*inputs))
        finally:
            Tape.busy = False
        self.whole = True
        blank(tape.calls)
        Tape.made += 1
        return outputs, partial(_play, tape.calls, tape.lent, self.pool)


def blank(calls: list[Any]) -> None:
    """What was recorded has not been computed."""
    for place in (place for *_, places in calls for place in places if place is not None):
        place.fill_(torch.nan if place.is_floating_point() else -(1 << 20) if place.dtype == torch.long else 1)


def _play(calls: list[Any], lent: list[StorageWeakRef], pool: Pool) -> None:
    """The pool is only kept; that the lenders keep what they lent is not for a graph to see to."""
    if any(one.expired() for one in lent):
        raise Gone("a graph uses a tensor that is gone")
    with _disable_current_modes():
        for func, args, kwargs, places in calls:
            found = func(*args, **kwargs)
            for place, t in zip(places, [found] if isinstance(found, Tensor) else tree_leaves(found), strict=True):
                if place is not None:
                    place.copy_(t)
