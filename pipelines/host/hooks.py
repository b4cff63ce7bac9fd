"""Swaps an instance's class for a subclass, and back; mmspec changes models in no other way."""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, SupportsIndex

from mmspec.modes import stock_class

_OLD = "_old_forward"  # where accelerate's hooks keep a module's forward
_LOCK = threading.RLock()  # enable and disable may be called from any thread


def stock(instance: object) -> Any:
    """The instance's own class. Mixins use it instead of `super()`, which breaks if another thread swaps the class."""
    return stock_class(type(instance))


def swap(instance: object, mixin: type, **attributes: object) -> None:
    """Put `mixin` in front of the instance's class, replacing an earlier mixin.

    The class name is kept, so transformers' registries still find the class. `attributes` are stored on the new class,
    so that `vars(instance)` is unchanged; they are deleted with the mixin or the instance.
    """
    with _LOCK:
        before, base = _swapped(instance), _without(instance)
        names: dict[str, Any] = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        names |= {_OLD: _below_accelerate(mixin)} if hasattr(mixin, "forward") else {}
        subclass: Any = type(base.__name__, (mixin, _Swapped, base), {**names, **attributes, "_mmspec_stock": base})
        subclass._mmspec_named = tuple(attributes)
        clear = _clear  # a model that lives until the interpreter exits outlives this module's globals
        subclass._mmspec_instance = weakref.ref(instance, lambda _: clear(subclass))
        instance.__class__ = subclass
        _clear(before)


def _of_class(self: object, *args: object, **kwargs: object) -> object:
    """The forward of the module's class, swapped or not."""
    return type(self).forward(self, *args, **kwargs)  # type: ignore[attr-defined]


def _below_accelerate(mixin: Any) -> property:
    """An attribute of a swapped class by which accelerate's hooks call the mixin's forward.

    Such a hook is a forward of the instance, which hides that of the class, and calls the instance's `_old_forward`.
    What it leaves when it is removed runs the forward of the class, too.
    """

    def read(self: object) -> object:
        if _OLD not in vars(self):
            raise AttributeError(_OLD)
        return MethodType(_of_class, self)

    def write(self: object, forward: object) -> None:
        ours = getattr(forward, "__func__", None) is mixin.forward  # the hook is put on now
        vars(self)[_OLD] = MethodType(_of_class, self) if ours else forward

    return property(read, write, lambda self: vars(self).pop(_OLD))


def hides(instance: object) -> bool:
    """Whether the instance has a forward of its own that hides a mixin's: neither a hook of accelerate over that of its
    class nor what such a hook left."""
    own = vars(instance)
    runs = getattr(own.get(_OLD, own.get("forward")), "__func__", None)
    hooked = _OLD in own and runs is stock(instance).forward
    return "forward" in own and not hooked and runs is not _of_class


def restore(instance: object) -> None:
    """Give the instance its own class back; does nothing if it was not swapped."""
    with _LOCK:
        before, instance.__class__ = _swapped(instance), _without(instance)
        _clear(before)


def _swapped(instance: object) -> Any:
    """The class that `swap` made for the instance, which may have been subclassed since; None: there is none."""
    return next((kind for kind in type(instance).__mro__ if "_mmspec_stock" in kind.__dict__), None)


def _without(instance: object) -> type:
    """The instance's class without the one that `swap` made.

    A subclass that somebody else made of that one meanwhile, as fully_shard and parametrizations do, stays and gets the
    stock class as its base.
    """
    kind: Any = type(instance)
    ours = _swapped(instance)
    if kind is ours:
        return stock(instance)
    for each in kind.__mro__:
        if ours in each.__bases__:
            each.__bases__ = tuple(ours._mmspec_stock if base is ours else base for base in each.__bases__)
    return kind


def _clear(kind: Any) -> None:
    """Delete a swapped class's attributes now: the class refers to itself, so only the garbage collector frees it."""
    for name in getattr(kind, "_mmspec_named", ()):
        delattr(kind, name)
    if kind is not None:
        kind._mmspec_named = ()


def hold(instance: Any, mixin: type, **attributes: object) -> None:
    """Like `swap`, with a count of users: only the first one swaps. Each has to call `release`."""
    with _LOCK:
        if (count := getattr(_swapped(instance), "_mmspec_count", 0)) == 0:
            swap(instance, mixin, **attributes)
        _swapped(instance)._mmspec_count = count + 1


def release(instance: Any) -> None:
    """Undo one `hold`; the last one restores the class."""
    with _LOCK:
        count = getattr(_swapped(instance), "_mmspec_count", 0)
        if count > 1:
            _swapped(instance)._mmspec_count = count - 1
        elif count == 1:
            restore(instance)


class Taps:
    """A context in which some modules have mixins; several calls may be inside at the same time.

    Args:
        mixins: modules, each with its mixin and the attributes of that.
    """

    def __init__(self, mixins: Iterable[tuple[object, type, Mapping[str, object]]]) -> None:
        self.mixins = list(mixins)
        self._inside = 0

    def __enter__(self) -> None:
        with _LOCK:
            if self._inside == 0:
                for module, mixin, attributes in self.mixins:
                    hold(module, mixin, **attributes)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            self._inside -= 1
            if self._inside == 0:
                for module, _mixin, _attributes in self.mixins:
                    release(module)


class _Swapped:
    """Pickles and copies as the stock class, so that a saved model has no trace of mmspec."""

    _mmspec_stock: type

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        _, _, *rest = tuple(super().__reduce_ex__(max(2, int(protocol))))
        return (copyreg._reconstructor, (self._mmspec_stock, object, None), *rest)  # type: ignore[attr-defined]
