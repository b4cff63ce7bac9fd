"""The one way mmspec touches a model: the instance's class is swapped for a subclass, and swapped back."""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from mmspec.modes import stock_class

_LOCK = threading.RLock()  # enable and disable may come from any thread


def stock(instance: object) -> Any:
    """The instance's own class. Mixins call it in place of `super()`, which breaks once another thread has swapped."""
    return stock_class(type(instance))


def swap(instance: object, mixin: type, **attributes: object) -> None:
    """Put `mixin` in front of the instance's class, in place of what swap put there before.

    Names are kept, so transformers' registries still find the class. `attributes` live on the new class, not in
    `vars(instance)`, which stays as it was; they go when the mixin goes, or the instance.
    """
    base = stock(instance)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made: Any = type(base.__name__, (mixin, _Swapped, base), {**names, **attributes, "_mmspec_stock": base})
    made._mmspec_named = tuple(attributes)
    emptied = _emptied  # a model that lives until the interpreter ends outlives this module's globals
    made._mmspec_instance = weakref.ref(instance, lambda _: emptied(made))
    with _LOCK:
        before, instance.__class__ = type(instance), made
        _emptied(before)


def restore(instance: object) -> None:
    """Give the instance its own class back; nothing happens where it was never swapped."""
    with _LOCK:
        before, instance.__class__ = type(instance), stock(instance)
        _emptied(before)


def _emptied(kind: Any) -> None:
    """Take off a class what it was given: a class refers to itself, so it stays until the garbage collector runs."""
    for name in kind.__dict__.get("_mmspec_named", ()):
        delattr(kind, name)
    if "_mmspec_named" in kind.__dict__:
        kind._mmspec_named = ()


def hold(instance: Any, mixin: type, **attributes: object) -> None:
    """As `swap`, for something that several hold at once: only the first swaps. Each has to `release` it."""
    with _LOCK:
        if (count := getattr(type(instance), "_mmspec_count", 0)) == 0:
            swap(instance, mixin, **attributes)
        type(instance)._mmspec_count = count + 1


def release(instance: Any) -> None:
    """Undo one `hold`; the last one gives the class back."""
    with _LOCK:
        count = getattr(type(instance), "_mmspec_count", 0)
        if count > 1:
            type(instance)._mmspec_count = count - 1
        elif count == 1:
            restore(instance)


class Taps:
    """Mixins in front of the classes of some modules while anybody is inside; several calls may be at once.

    Args:
        wanted: a module, its mixin, and the attributes that this goes with.
    """

    def __init__(self, wanted: Iterable[tuple[object, type, Mapping[str, object]]]) -> None:
        self.wanted = list(wanted)
        self._inside = 0

    def __enter__(self) -> None:
        with _LOCK:
            if self._inside == 0:
                for module, mixin, attributes in self.wanted:
                    hold(module, mixin, **attributes)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            self._inside -= 1
            if self._inside == 0:
                for wanted in self.wanted:
                    release(wanted[0])


class _Swapped:
    """Pickles and copies as the stock class, so that a saved model knows nothing of mmspec."""

    _mmspec_stock: type

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        _, _, *rest = tuple(super().__reduce_ex__(max(2, int(protocol))))
        return (copyreg._reconstructor, (self._mmspec_stock, object, None), *rest)  # type: ignore[attr-defined]
