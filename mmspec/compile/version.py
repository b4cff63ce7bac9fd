"""The version of a model: as long as it stays, what was captured of the model, or kept of its prompts, is valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
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
_REFRESHED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how often `refresh` was called, by module


@dataclass(frozen=True)
class Version:
    """Equal to another one if a forward computes the same of the same inputs; made in about 1 µs for each module.

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
    known = None if kept else _READ.get()
    if known is None:
        return _version(root, kept)
    if id(root) not in known:
        known[id(root)] = root, _version(root)
    return known[id(root)][1]


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
        if isinstance(value, list | tuple | dict | set | frozenset):
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            return type(value), len(value), [part for part in parts if type(part) in PLAIN]
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
            if name.endswith("config") and hasattr(value, "__dict__"):
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


def refresh(*models: nn.Module) -> None:
    """Make what was captured and kept of these modules, and of those around and below them, invalid."""
    for module in each_module(*models):
        _REFRESHED[module] = _REFRESHED.get(module, 0) + 1


def _written(t: Tensor) -> tuple[int, int]:
    where = t.data_ptr() if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided else 0
    return 0 if t.is_inference() else t._version, where


def _with_those_inside(config: Any) -> Iterator[Any]:
    yield config
    for name, value in vars(config).items():
        if name.endswith("config") and hasattr(value, "__dict__"):
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
