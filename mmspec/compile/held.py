"""Captured functions of one module, each used once it has given the module's own result."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmspec.compile import graphs
from mmspec.compile.capture import PiecewiseFunction, Uncapturable
from mmspec.compile.patience import Patience
from mmspec.compile.products import Joined
from mmspec.compile.version import Contents, fingerprint
from mmspec.config import AUTO
from mmspec.modes import ambient

_STATES = 4  # that captures are held of at a time
_LOST = 8  # captured states that may be let go before no more is captured
# Largest distance from the module itself, as a share of its largest number: another order of summation, no more.
_SETTLED = ContextVar("settled", default=False)
_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class CompiledCache:
    """Captures by shape and surroundings (autocast, default dtype); None for what cannot be captured, which runs
    uncompiled, with a warning.

    If parameters or buffers are replaced, everything is captured anew; if they only move, graphs notice it themselves.
    Everything else that a forward may read is its state. Captures of a few states are held, so that a flag that is
    switched back and forth is captured once each. While hooks or the like run with the module, nothing is captured or
    replayed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.within = 0  # in the key: the state of a module around this one
        self.patience: Patience | None = None  # with `compile="auto"`; None: what comes up is captured at once
        self._held: dict[Any, PiecewiseFunction | None] = {}  # of the last call's state
        self._weights: Any = None
        self._states: list[tuple[int, Any, dict[Any, PiecewiseFunction | None]]] = []  # the last call's first
        self._copies: dict[Joined, None] = {}  # of weights, that captured functions read in their place
        self._copied = Contents()  # the weights of these copies
        self._written: Any = None  # what they held at the last call
        self._seen = self._lost = 0
        self._why: str | None = None
        self._warned = ""
        self._lock, self._choosing = threading.Lock(), threading.RLock()

    @classmethod
    def of(cls, module: Any, compile: bool | str = True) -> Self | None:
        """What is captured of a module; it outlives every call, and goes with the module.

        Args:
            compile: as `enable` was told; None comes back where nothing is to be captured.
        """
        if not compile:
            return None
        found = _OF.setdefault(module, cls(type(module).__name__))
        found.wait((found.patience or Patience()) if compile == AUTO else None)
        found.check(module)
        return found

    def wait(self, patience: Patience | None) -> None:
        """A call begins, for which everything is captured at once, or only once it is worth it."""
        self.patience = patience
        if patience is not None:
            patience.begin()

    def check(self, module: Any) -> None:
        """At the start of a call: let go what was captured of other weights, find what was captured of this state."""
        weights, state, why = fingerprint(module)
        weights = [graphs.wish(), *weights]
        with self._choosing:
            if weights != self._weights:
                self.forget()
                self._weights = weights
            self._renew()
            self._choose(state)
            if why is None and self._lost >= _LOST:
                why = "what its modules hold changes from call to call"
            self._why = why

    def _renew(self) -> None:
        """Copy weights anew whose values changed since the last call."""
        written = self._copied.now()
        if written == self._written:
            return
        self._written = None  # so that a renewal which is interrupted is begun anew by the next call
        try:
            self.renew()
        except Exception:  # such as weights that went to another device: they are captured anew
            self.forget()
        else:
            self._written = written

    def _keep_copies(self) -> None:
        """Of weights, for what is captured now."""
        functions = [made for _, _, held in self._states for made in list(held.values()) if made]
        self._copies = dict.fromkeys(copy for made in functions for copy in made.copies)
        self._copied = Contents(part.weight for copy in self._copies for part in copy.parts)
        self._written = None
        self._renew()  # the older ones, too: they may have been written to while this one was captured

    def renew(self) -> None:
        """Copy anew what was copied of weights."""
        for copy in self._copies:
            copy.renew()

    def _choose(self, state: Any) -> None:
        found = next((one for one in self._states if one[1] == state), None)
        if found is None:
            self._seen += 1
            found = (self._seen, state, {})
        self._states = [found, *(one for one in self._states if one is not found)]
        for _, _, held in self._states[_STATES:]:
            self._lost += any(held.values())
        del self._states[_STATES:]
        self._held = found[2]

    def forget(self) -> None:
        """Let go all that was captured."""
        self._states, self._held, self._lost = [], {}, 0
        self._copies, self._copied = {}, Contents()

    def known(self, key: Any) -> PiecewiseFunction | None:
        """What is held for a key, as things stand."""
        return self._held.get((key, self.within, ambient())) if self._why is None else None

    def failed(self, key: Any) -> bool:
        """Whether a capture for a key was tried in vain, or would be, as things stand."""
        return self._why is not None or self._held.get((key, self.within, ambient()), ...) is None

    def get(self, key: Any, make: Callable[[], PiecewiseFunction], quiet: bool = False) -> PiecewiseFunction | None:
        """What is held for a key; at its first call what `make` gives, which raises where that is not to be trusted.

        Args:
            quiet: say nothing of what is not.
        """
        if self._why is not None:
            self._say(self._why)
            return None
        held, key = self._held, (key, self.within, ambient())  # another thread may put a new one in its place
        patience = self.patience
        if patience is not None:
            patience.asked(key, captured=held.get(key) is not None)
            if key in held and patience.regrets(key):
                held.pop(key, None)
                self._keep_copies()
        wanted = key not in held and not _SETTLED.get() and (patience is None or patience.due(key))
        if wanted and self._lock.acquire(blocking=patience is None):  # those that can wait do not wait for another
            try:
                if key not in held:
                    held[key] = self._made(make, quiet)
                    self._keep_copies()
            finally:
                self._lock.release()
        return held.get(key)

    def _say(self, why: str) -> None:
        """Once, until it changes; `compile="auto"` promises nothing."""
        if why != self._warned and self.patience is None:
            self._warned = why
            warnings.warn(f"mmspec runs {self.name} uncompiled: {why}", stacklevel=3)

    def _made(self, make: Callable[[], PiecewiseFunction], quiet: bool) -> PiecewiseFunction | None:
        began = time.perf_counter()
        try:
            return make()
        except Exception as error:  # no compiler, an unknown operation, a branch: all leave the module as it is
            name = "" if isinstance(error, Uncapturable) else f"{type(error).__name__}: "
            why = name + str(error).strip().partition("\n")[0]
        finally:
            if self.patience is not None:
                self.patience.captured(time.perf_counter() - began)
        if self.patience is None and not quiet:
            warnings.warn(f"mmspec runs {self.name} uncompiled: {why}", stacklevel=2)
        return None


_OF: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


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
