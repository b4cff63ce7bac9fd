"""Captured functions of one module, by key, held as long as the module's version stays."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmspec.compile import graphs
from mmspec.compile.capture import PiecewiseFunction, Uncapturable
from mmspec.compile.version import Version, version
from mmspec.modes import ambient

_DROPS = 8  # times that captures may be dropped because the module changed, before nothing more is captured
_SETTLED = ContextVar("settled", default=False)
# Largest distance from the module itself, as a share of its largest number: another order of summation, no more.
_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Held:
    """Captures by shape and surroundings (autocast, default dtype); None for what cannot be captured, which runs
    uncompiled, with a warning. Each is used once it has given the module's own result.

    Attributes:
        name: of the module, for warnings.
        drafts: what was captured of drafters that read this module's weights, by their own weights.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.drafts: WeakKeyDictionary[nn.Module, Held] = WeakKeyDictionary()
        self._held: dict[Hashable, PiecewiseFunction | None] = {}
        self._seen: Version | None = None  # that captures are valid for
        self._wish = ""  # whether graphs were recorded
        self._drops = 0
        self._why: str | None = None
        self._warned = ""
        self._making, self._checking = threading.Lock(), threading.RLock()

    @classmethod
    def of(cls, module: nn.Module, compile: bool = True) -> Self | None:
        """What is captured of a module, which outlives every call, checked for this one; None without `compile`."""
        if not compile:
            return None
        captures = _OF.setdefault(module, cls(type(module).__name__))
        assert isinstance(captures, cls)
        captures.check(module)
        return captures

    def beside(self, weights: nn.Module, name: str) -> Held:
        """What is captured of a drafter with these weights, which reads this module's, too."""
        return self.drafts.setdefault(weights, Held(name))

    def check(self, module: nn.Module) -> None:
        """At the start of a call: drop what was captured of another version of the module."""
        wish, now = graphs.wish(), version(module)
        with self._checking:
            before, self._why = self._seen, now.why
            if before is None or (wish, now.weights, now.state) != (self._wish, before.weights, before.state):
                same = before is not None and now.weights == before.weights
                self._drops = self._drops + any(self._held.values()) if same else 0
                self.forget()
            self._wish, self._seen = wish, now
            if self._why is None and self._drops >= _DROPS:
                self._why = "what its modules hold changes from call to call"

    def forget(self) -> None:
        """Drop all captures, also of drafters in use, which have these very objects."""
        self._held = {}
        for held in list(self.drafts.values()):
            held.forget()

    def known(self, key: Hashable) -> PiecewiseFunction | None:
        """What is held for a key."""
        return self._held.get((key, ambient())) if self._why is None else None

    def failed(self, key: Hashable) -> bool:
        """Whether a capture for a key was tried in vain, or would be."""
        return self._why is not None or self._held.get((key, ambient()), ...) is None

    def get(
        self, key: Hashable, make: Callable[[], PiecewiseFunction], quiet: bool = False
    ) -> PiecewiseFunction | None:
        """What is held for a key; at its first call what `make` gives, which raises where that is not to be trusted.

        Args:
            quiet: no warning where it raises.
        """
        if self._why is not None:
            if self._why != self._warned:  # once, until it changes
                self._warned = self._why
                warnings.warn(f"mmspec runs {self.name} uncompiled: {self._why}", stacklevel=2)
            return None
        held, key = self._held, (key, ambient())  # another thread may put a new dictionary in its place
        if key not in held and not _SETTLED.get():
            with self._making:
                if key not in held:
                    held[key] = self._made(make, quiet)
        return held.get(key)

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> PiecewiseFunction | None:
        """The forward of a module without attentions, captured for inputs of these shapes."""

        def made() -> PiecewiseFunction:
            given = [t.clone() for t in inputs]
            return PiecewiseFunction(lambda *given: [module(*given)], given, weights(module))

        return self.get(tuple(t.shape for t in inputs), made)

    def _made(self, make: Callable[[], PiecewiseFunction], quiet: bool) -> PiecewiseFunction | None:
        try:
            return make()
        except Exception as error:  # no compiler, an unknown operation, a branch: all leave the module as it is
            name = "" if isinstance(error, Uncapturable) else f"{type(error).__name__}: "
            why = name + str(error).strip().partition("\n")[0]
        if not quiet:
            warnings.warn(f"mmspec runs {self.name} uncompiled: {why}", stacklevel=2)
        return None


_OF: WeakKeyDictionary[nn.Module, Held] = WeakKeyDictionary()


@contextmanager
def settled(yes: bool = True) -> Iterator[None]:
    """Inside, nothing new is captured: what comes up for the first time runs as it is."""
    before = _SETTLED.set(yes)
    try:
        yield
    finally:
        _SETTLED.reset(before)


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
