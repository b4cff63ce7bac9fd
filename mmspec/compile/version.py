"""What a forward can read besides its inputs: a capture is valid as long as none of it changes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from mmspec.modes import each_module, hooked, hooked_everywhere, lasting

# Not looked at: what every module has (parameters and buffers are looked at apart), and what `generate` alone uses.
_MODULE = {*vars(nn.Module())} - {"training"}
_MODULE |= {"generation_config", "warnings_issued", "_previous_max_cache_length", "_output_capturing_hooks_installed"}
PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_MOST = 256  # entries of a list or dictionary that are looked at
_DEEP = 4  # lists in lists


class Fingerprint(NamedTuple):
    """Equal if forwards read the same besides their inputs; made once a call, in about 1 µs for each module."""

    weights: list[Any]  # parameters and buffers: which they are, not what they hold
    state: list[Any]  # classes, flags, plain attributes, functions and settings of all modules
    why: str | None  # what keeps a captured forward from standing for the module, whatever it reads


def fingerprint(root: Any, kept: bool = False) -> Fingerprint:
    """Of a module and all below it.

    Args:
        kept: also tell whether tensors that are no parameters were replaced, and whether any was written to.
    """
    weights: list[Any] = []
    state: list[Any] = []
    classes: dict[type, Any] = {}
    configs: dict[int, Any] = {}
    why = "forward hooks are registered for all modules" if hooked_everywhere() else None
    for module in each_module(root):
        kind, held = type(module), vars(module)
        if kind not in classes:
            classes[kind] = getattr(kind, "_mmspec_stock", kind)
        state.append(id(classes[kind]))
        for tensors in (held["_parameters"], held["_buffers"]):
            if tensors:
                weights += [t if t is None else (id(t), t.dtype, t.device, t.shape) for t in tensors.values()]
                if kept:
                    weights += [0 if t is None or t.is_inference() else t._version for t in tensors.values()]
        for name in held:
            if name in _MODULE:
                continue
            value = held[name]
            state.append(name)
            if type(value) in PLAIN:
                state.append(value)
            elif name.endswith("config") and hasattr(value, "__dict__"):
                configs[id(value)] = value
                state.append(id(value))
            else:
                state.append(_token(value, kept))
        if why is None and (found := _obstacle(module, held)) is not None:
            why = f"{_name(root, module)} {found}"
    for stock in classes.values():
        state += [_Same(stock), _Same(stock.forward)]
    state += [_settings(config, kept) for config in configs.values()]
    return Fingerprint(weights, state, why)


def held(root: Any) -> list[Tensor]:
    """The parameters and buffers of a module and all below it."""
    found = (t for m in each_module(root) for t in (*m._parameters.values(), *m._buffers.values()))
    return [t for t in found if t is not None]


class Contents:
    """Which values some tensors hold: how often each was written to, where it lies, and what it makes of a vector.

    The product with a fixed vector tells writes that torch does not count, such as those through `.data`, also to a
    part of a tensor. It reads every tensor once, which takes about as long as a plain step.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.tensors = [t for t in tensors if t.layout is torch.strided and not t.is_meta]

    @torch.no_grad()
    def now(self) -> tuple[Any, ...]:
        """To be compared with what it told before."""
        where = [(t.data_ptr(), t.stride()) for t in self.tensors]
        written = [0 if t.is_inference() else t._version for t in self.tensors]
        found: dict[Any, list[Tensor]] = {}
        for t in self.tensors:
            digest = _digest(t)
            found.setdefault((digest.device, digest.dtype), []).append(digest)
        return written, where, [torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in found.values()]


def _digest(t: Tensor) -> Tensor:
    """A number for each row, which changes with what a product with these rows gives."""
    rows = t.reshape(len(t), -1) if t.dim() > 1 and len(t) else t.reshape(1, -1)
    if t.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return rows @ _direction(rows.shape[1], t.dtype, t.device)
    return (rows.contiguous().view(torch.uint8) if rows.numel() else rows).sum(1, dtype=torch.int64)


@lru_cache(maxsize=64)
@lasting()
def _direction(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(0)).to(device, dtype)


class _Same(ref):  # type: ignore[type-arg]
    """Keeps nothing alive, and is equal to another of the same object as long as that lives."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Same) and self() is not None and self() is other())

    __hash__ = ref.__hash__


def _token(value: Any, kept: bool, deep: int = _DEEP) -> Any:
    """What can be compared later, in place of something that may change or go."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):  # no capture can use it, so only its coming and going may count
        return _Same(value) if kept else None
    if isinstance(value, list | tuple | dict | set | frozenset):
        if len(value) > _MOST or not deep:
            return (kind, id(value), len(value))
        parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
        tokens = [_token(part, kept, deep - 1) for part in parts]
        return (kind, tokens)
    if isinstance(value, MethodType):
        return (_Same(value.__func__), id(value.__self__))
    if not callable(value):
        return id(kind)
    try:
        return _Same(value)
    except TypeError:
        return id(value)


def _settings(config: Any, kept: bool, deep: int = _DEEP) -> list[Any]:
    """A configuration and those inside it."""
    found: list[Any] = []
    for name, value in vars(config).items():
        inner = deep and name.endswith("config") and hasattr(value, "__dict__")
        found += [name, _settings(value, kept, deep - 1) if inner else _token(value, kept)]
    return found


def _obstacle(module: Any, held: dict[str, Any]) -> str | None:
    """What runs with a module's forward and cannot be seen to be the same at the next call, or None."""
    if hooked(module):
        return "has forward hooks"
    if held.get("_compiled_call_impl") is not None:
        return "is compiled by itself"
    if "_diffusers_hook" in held:
        return "has hooks of diffusers"
    if "forward" not in held or _moves_alone(held.get("_hf_hook")):
        return None
    forward = held["forward"]
    method = isinstance(forward, MethodType) and forward.__self__ is module
    if method and isinstance(forward.__func__, FunctionType) and not forward.__func__.__closure__:
        return None
    return "has a forward of its own"


def _moves_alone(hook: Any) -> bool:
    """Whether a module's own forward is accelerate's, which moves tensors between devices and does nothing else."""
    return type(hook).__module__ == "accelerate.hooks"


def _name(root: Any, module: Any) -> str:
    return next((name for name, found in root.named_modules() if found is module and name), type(module).__name__)
