"""Captured functions of one module, each trusted once it has given what the module itself gives."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmspec import graphs
from mmspec.capture import Captured, Uncapturable

# Largest distance from the module itself, as a share of its largest number: another order of summation, no more.
_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Trusted:
    """What was captured, by shape; None for what cannot be, which runs as it is, with a warning.

    Other parameters or buffers than then, and all is captured anew; those that only moved are seen by its graphs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: dict[Any, Captured | None] = {}
        self._weights: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, module: Any) -> Self:
        """What is captured of a module; it outlives every call, and goes with the module."""
        found = _OF.setdefault(module, cls(type(module).__name__))
        found.check(module)
        return found

    def check(self, module: Any) -> None:
        """Let go what was captured of other weights."""
        found = (graphs.wish(), *((id(w), w.dtype, w.device) for w in weights(module)))
        if found != self._weights:
            self.forget()
            self._weights = found

    def forget(self) -> None:
        """Let go all that was captured."""
        self._held = {}

    def get(self, key: Any, make: Callable[[], Captured]) -> Captured | None:
        """What is held for a key; at its first call what `make` gives, which raises where that is not to be trusted."""
        held = self._held  # another thread may put a new one in its place
        if key not in held:
            with self._lock:
                if key not in held:
                    held[key] = self._made(make)
        return held[key]

    def _made(self, make: Callable[[], Captured]) -> Captured | None:
        try:
            return make()
        except Exception as error:  # no compiler, an unknown operation, a branch: all leave the module as it is
            name = "" if isinstance(error, Uncapturable) else f"{type(error).__name__}: "
            why = name + str(error).strip().partition("\n")[0]
        warnings.warn(f"mmspec runs {self.name} uncompiled: {why}", stacklevel=2)
        return None


_OF: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def compare(mine: Sequence[Tensor], stock: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Refuse outputs that are not those of the module itself, as near as this dtype allows.

    Raises:
        Uncapturable: they are further away.
    """
    apart = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(stock, mine, strict=True)]
    if not all(share <= _NEAR.get(dtype, 1e-4) for share in apart):  # NaN is not near
        raise Uncapturable(f"its outputs would be {max(apart):.1e} away from the uncompiled ones")


def weights(module: Any) -> list[Tensor]:
    """All tensors that a captured function may use besides its inputs."""
    return [*module.parameters(), *module.buffers()]
