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
from mmspec.capture import Captured

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
            self._held, self._weights = {}, found

    def get(
        self, key: Any, dtype: torch.dtype, capture: Callable[[], Captured],
        run: Callable[[Captured], Sequence[Tensor]], stock: Callable[[], Sequence[Tensor]],
    ) -> Captured | None:  # fmt: skip
        """What is held for a key; at its first call what `capture` gives, if it runs as `stock` does in this dtype."""
        held = self._held  # another thread may put a new one in its place
        if key not in held:
            with self._lock:
                if key not in held:
                    held[key] = self._tried(dtype, capture, run, stock)
        return held[key]

    def _tried(
        self, dtype: torch.dtype, capture: Callable[[], Captured], run: Callable[[Captured], Sequence[Tensor]],
        stock: Callable[[], Sequence[Tensor]],
    ) -> Captured | None:  # fmt: skip
        try:
            captured = capture()
            mine = run(captured)  # its graphs, where it has some, are recorded by now
        except Exception as error:  # no compiler, an unknown operation, a branch: all leave the module as it is
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            apart = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(stock(), mine, strict=True)]
            if all(share <= _NEAR.get(dtype, 1e-4) for share in apart):  # NaN is not near
                return captured
            why = f"its outputs would be {max(apart):.1e} away from the uncompiled ones"
        warnings.warn(f"mmspec runs {self.name} uncompiled: {why}", stacklevel=2)
        return None


_OF: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def weights(module: Any) -> list[Tensor]:
    """All tensors that a captured function may use besides its inputs."""
    return [*module.parameters(), *module.buffers()]
