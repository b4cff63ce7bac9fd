"""A cache of captured functions of one module, which are valid as long as the module's version does not change."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mmspec.compile import graphs
from mmspec.compile.capture import PiecewiseFunction, Uncapturable
from mmspec.compile.version import Version, version
from mmspec.modes import ambient

_DROPS = 8  # after so many drops of captures because the module changed, nothing more is captured
_SETTLED = ContextVar("settled", default=False)


class CaptureCache:
    """Captures by shape and surroundings (autocast, default dtype); None for a function that cannot be captured and
    runs uncompiled, with a warning. A capture is used after it has reproduced the module's own result.

    Attributes:
        name: of the module, for warnings.
        drafts: the caches of drafters that read some of this module's weights, by their own weights.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.drafts: WeakKeyDictionary[nn.Module, CaptureCache] = WeakKeyDictionary()
        self._captures: dict[Hashable, PiecewiseFunction | None] = {}
        self._seen: list[Version] = []  # the versions that captures are valid for
        self._graphs = ""  # the value of MMSPEC_GRAPHS for these captures
        self._drops = 0
        self._why: str | None = None  # reason why nothing is captured
        self._warned = ""
        self._making, self._checking = threading.Lock(), threading.RLock()

    @classmethod
    def of(cls, module: nn.Module, compile: bool = True) -> Self | None:
        """The cache of a module, shared by all calls and checked for this one; None without `compile`."""
        if not compile:
            return None
        captures = _OF.setdefault(module, cls(type(module).__name__))
        assert isinstance(captures, cls)
        captures.check(module)
        return captures

    def of_drafter(self, weights: nn.Module, name: str) -> CaptureCache:
        """The cache of a drafter with these weights, which reads this module's, too."""
        return self.drafts.setdefault(weights, CaptureCache(name))

    def check(self, *modules: nn.Module) -> None:
        """At the start of a call: drop the captures of other versions of the modules that they read."""
        setting, now = graphs.setting(), [version(module) for module in modules]
        weights, state = [one.weights for one in now], [one.state for one in now]
        with self._checking:
            before, self._why = self._seen, next((one.why for one in now if one.why is not None), None)
            same = weights == [one.weights for one in before]
            if not same or (setting, state) != (self._graphs, [one.state for one in before]):
                self._drops = self._drops + any(self._captures.values()) if same else 0
                self._captures = {}  # another one, since drafters in use may hold this one
            self._graphs, self._seen = setting, now
            if self._why is None and self._drops >= _DROPS:
                self._why = "the attributes of its modules change from call to call"

    def existing(self, key: Hashable) -> PiecewiseFunction | None:
        """The capture for a key, if there is one."""
        return self._captures.get((key, ambient())) if self._why is None else None

    def failed(self, key: Hashable) -> bool:
        """Whether a capture for a key has failed, or would fail."""
        return self._why is not None or self._captures.get((key, ambient()), ...) is None

    def get(
        self, key: Hashable, make: Callable[[], PiecewiseFunction], quiet: bool = False
    ) -> PiecewiseFunction | None:
        """The capture for a key, built by `make` at the first call; `make` raises if the capture cannot be trusted.

        Args:
            quiet: no warning if it raises.
        """
        if self._why is not None:
            self._warn(self._why)
            return None
        captures, key = self._captures, (key, ambient())  # another thread may replace the dictionary
        if key not in captures and not _SETTLED.get():
            with self._making:
                if key not in captures:
                    captures[key] = self._build(make, quiet)
        return captures.get(key)

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]] | None:
        """The forward of a module without attentions, captured for inputs of these shapes."""

        def make() -> PiecewiseFunction:
            examples = [t.clone() for t in inputs]
            return PiecewiseFunction(lambda *args: [module(*args)], examples, weights(module))

        captured = self.get(tuple(t.shape for t in inputs), make)
        return None if captured is None else partial(captured, unattended)

    def _build(self, make: Callable[[], PiecewiseFunction], quiet: bool) -> PiecewiseFunction | None:
        try:
            return make()
        except Exception as error:  # no compiler, an unknown operation, a branch: the module then runs uncompiled
            name = "" if isinstance(error, Uncapturable) else f"{type(error).__name__}: "
            why = name + str(error).strip().partition("\n")[0]
        if not quiet:
            self._warn(why)
        return None

    def _warn(self, why: str) -> None:
        """Warn that the module runs uncompiled, once until the reason changes."""
        if why != self._warned:
            self._warned = why
            warnings.warn(f"mmspec runs {self.name} uncompiled: {why}", stacklevel=3)


_OF: WeakKeyDictionary[nn.Module, CaptureCache] = WeakKeyDictionary()


@contextmanager
def settled(yes: bool = True) -> Iterator[None]:
    """Inside the `with` block, nothing new is captured: functions without a capture run uncompiled."""
    before = _SETTLED.set(yes)
    try:
        yield
    finally:
        _SETTLED.reset(before)


def unattended(*_: object) -> Tensor:
    """The attention of a captured function that has none."""
    raise AssertionError("this function has no attention")


def weights(module: Any) -> list[Tensor]:
    """All tensors that a captured function may use besides its inputs."""
    return [*module.parameters(), *module.buffers()]
