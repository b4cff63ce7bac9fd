"""The version of a model: as long as it stays, what was captured of the model, or kept of its prompts, is valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, islice
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from mmspec.modes import each_module, hooked, hooked_everywhere, stock_class

PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
# Attributes that are not looked at: those of every module (parameters and buffers are read apart), and of `generate`.
_ASIDE = {*vars(nn.Module())} - {"training"}
_ASIDE |= {"generation_config", "warnings_issued", "_previous_max_cache_length", "_output_capturing_hooks_installed"}
Marks = list[Any]  # of anything that can be told apart from others
_READ: ContextVar[dict[int, tuple[nn.Module, Version]] | None] = ContextVar("mmspec_versions", default=None)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_BARE = tuple(vars(nn.Module()))  # attributes of every module, in this order
_INSIDE = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")  # those that are looked into
_SEEN: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()  # what was read last, by module
_REFRESHED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how often `refresh` was called, by module


@dataclass(frozen=True)
class Version:
    """Equal to another one if a forward computes the same of the same inputs.

    Hold it as long as it is compared with others: it keeps its numbers from being given to other objects. A write that
    goes past torch's counters (through `.data`, a numpy view, another process) is not seen; see `refresh`.

    Attributes:
        weights: which parameters and buffers there are.
        state: classes, flags, plain attributes, functions, configurations, and calls of `refresh`.
        written: of each parameter and buffer how often it was written to, and where it lies.
        why: what keeps a capture from standing for the model's forward, such as hooks; None: nothing.
    """

    weights: Marks
    state: Marks
    written: Marks
    why: str | None
    _alive: list[ref[Any]] = field(compare=False, repr=False)  # weak references, by whose ids it tells objects apart


@contextmanager
def unchanging() -> Iterator[None]:
    """Within, the version of a module is read once: a call changes none."""
    if _READ.get() is not None:
        yield
        return
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def version(root: nn.Module, kept: bool = False) -> Version:
    """Of a module and all below it.

    Args:
        kept: also tell whether tensors that are neither parameters nor buffers were replaced; read anew each time.
    """
    if kept:
        return _version(root, kept)
    known = _READ.get()
    if known is None:
        return _latest(root)
    if id(root) not in known:
        known[id(root)] = root, _latest(root)
    return known[id(root)][1]


def _latest(root: nn.Module) -> Version:
    """The version that was read last where nothing of it has changed, else another."""
    seen = _SEEN.get(root)
    if seen is None or not seen.stands():
        seen = _SEEN[root] = _Seen(root)
    return seen.version


def _version(root: nn.Module, kept: bool = False) -> Version:
    modules, alive, configs = list(each_module(root)), list[ref[Any]](), dict[int, Any]()
    classes = [stock_class(type(module)) for module in modules]  # another thread may swap them
    weights: Marks = []
    written: Marks = []
    state: Marks = [sum(_REFRESHED.get(module, 0) for module in modules) if _REFRESHED else 0]

    def known(thing: Any) -> int:
        """A number that no other object has while this version is held."""
        try:
            alive.append(ref(thing))
        except TypeError:
            return id(thing)
        return id(alive[-1])

    def told(value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, Tensor):  # no capture can use it
            return known(value) if kept else None
        if isinstance(value, _CONTAINERS):
            return _parts(value)
        return known(value) if callable(value) else type(value)

    why = "forward hooks are registered for all modules" if hooked_everywhere() else None
    for module, own in zip(modules, classes, strict=True):
        held = vars(module)
        state.append(id(own))
        for t in (*held["_parameters"].values(), *held["_buffers"].values()):
            weights += (t,) if t is None else (known(t), t.dtype, t.device, t.shape)
            written += (t,) if t is None else _written(t)
        for name, value in held.items():
            if name in _ASIDE:
                continue
            if _is_config(name, value):
                configs[id(value)] = value
                value = None
            state += (name, told(value))
        if why is None and (found := _obstacle(module, held)) is not None:
            why = f"{_name(root, module)} {found}"
    for config in (inner for outer in configs.values() for inner in _with_those_inside(outer)):
        state.append(known(config))
        for name, value in vars(config).items():
            state += (name, told(value))
    for stock in dict.fromkeys(classes):
        state += (known(stock), known(stock.forward))
    return Version(weights, state, written, why, alive)


def _parts(value: Any) -> Any:
    """What is compared of a list, a tuple, a set or a dict."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return type(value), len(value), [part for part in parts if type(part) in PLAIN]


class _Seen:
    """What a version was read off: to see that all of it still stands takes less time than to read it again.

    Attributes are compared by the ids of their values. An id is no other object's while what it belonged to lives:
    plain values and configurations are held here, of modules, tensors and functions a weak reference is asked. Of an
    attribute that holds a tensor, such as what a call leaves behind, only that it does, or holds nothing.
    """

    def __init__(self, root: nn.Module) -> None:
        modules, self.version = list(each_module(root)), _version(root)
        self._modules = list(map(ref, modules))
        self._skipped = [len(_BARE) * (tuple(islice(vars(m), len(_BARE))) == _BARE) for m in modules]
        outer = [value for m in modules for name, value in vars(m).items() if _is_config(name, value)]
        inner = {id(one): one for config in outer for one in _with_those_inside(config)}
        self._configs = [vars(one) for one in inner.values()]
        self._names, values = self._attributes(modules)
        own = sum(len(vars(m)) - n for m, n in zip(modules, self._skipped, strict=True))
        named = list(enumerate(zip(self._names, values, strict=True)))
        self._aside = [i for i, (name, _) in named[:own] if name in _ASIDE]
        self._left = [i for i, (_, value) in named[:own] if isinstance(value, Tensor)]
        self._ids = self._compared(values)
        self._plain = [value for value in values if type(value) in PLAIN]
        self._tensors = [i for i, (_, value) in named[own:] if isinstance(value, Tensor)]
        self._containers = [i for i, (name, value) in named if isinstance(value, _CONTAINERS) and name not in _ASIDE]
        self._state = self._state_of(modules, values)

    def stands(self) -> bool:
        modules = [module() for module in self._modules]
        if None in modules or any(thing() is None for thing in self.version._alive):
            return False
        names, values = self._attributes(modules)
        same = names == self._names and self._compared(values) == self._ids
        return same and self._state_of(modules, values) == self._state

    def _compared(self, values: list[Any]) -> list[int]:
        """Ids of the values that matter, 0 for the others."""
        ids = list(map(id, values))
        for i in self._aside:
            ids[i] = 0
        for i in self._left:
            ids[i] = 0 if values[i] is None or isinstance(values[i], Tensor) else ids[i]
        return ids

    def _attributes(self, modules: list[Any]) -> tuple[list[str], list[Any]]:
        """Names and values of what modules keep beside the attributes of every module, and of configurations."""
        own = list(map(vars, modules))
        inside = [*(held[name] for held in own for name in _INSIDE if held[name]), *self._configs]
        pairs = list(zip(own, self._skipped, strict=True))
        names = chain(chain.from_iterable(islice(held, n, None) for held, n in pairs), *inside)
        values = chain.from_iterable(islice(held.values(), n, None) for held, n in pairs)
        return list(names), [*values, *chain.from_iterable(map(dict.values, inside))]

    def _state_of(self, modules: list[Any], values: list[Any]) -> Any:
        """What may change without an attribute getting another value."""
        tensors, kinds = [values[i] for i in self._tensors], list[Any](map(type, modules))
        return (
            hooked_everywhere(),
            sum(_REFRESHED.get(module, 0) for module in modules) if _REFRESHED else 0,
            kinds,
            [kind.forward for kind in dict.fromkeys(kinds)],
            [module.training for module in modules],
            [(t.dtype, t.device, t.shape, *_written(t)) for t in tensors],
            [_parts(values[i]) for i in self._containers],
        )


def refresh(*models: nn.Module) -> None:
    """Make what was captured and kept of these modules, and of those around and below them, invalid."""
    for module in each_module(*models):
        _REFRESHED[module] = _REFRESHED.get(module, 0) + 1


def _written(t: Tensor) -> tuple[int, int]:
    where = t.data_ptr() if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided else 0
    return 0 if t.is_inference() else t._version, where


def _is_config(name: str, value: Any) -> bool:
    return name.endswith("config") and hasattr(value, "__dict__")


def _with_those_inside(config: Any) -> Iterator[Any]:
    yield config
    for name, value in vars(config).items():
        if _is_config(name, value):
            yield from _with_those_inside(value)


def _obstacle(module: nn.Module, held: dict[str, Any]) -> str | None:
    """What runs with a module's forward and cannot be seen to be the same at the next call, or None."""
    if hooked(module):
        return "has forward hooks"
    if held.get("_compiled_call_impl") is not None:
        return "is compiled by itself"
    if "_diffusers_hook" in held:
        return "has hooks of diffusers"
    # accelerate's own forward moves tensors between devices and does nothing else
    if "forward" not in held or type(held.get("_hf_hook")).__module__ == "accelerate.hooks":
        return None
    forward = held["forward"]
    method = isinstance(forward, MethodType) and forward.__self__ is module
    if method and isinstance(forward.__func__, FunctionType) and not forward.__func__.__closure__:
        return None
    return "has a forward of its own"


def _name(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, found in root.named_modules() if found is module and name), type(module).__name__)
