"""Autograd modes, autocast and hooks. Rounds run in inference mode, which is faster; lasting tensors outside of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as everywhere

T = TypeVar("T")
Mode = type[AbstractContextManager[None]]
_INERT = "transformers.utils.output_capturing"  # its hooks stay installed, and do nothing unless a call needs them
LOOKS_ON = "mmspec_looks_on"  # marks a hook that neither changes nor keeps a module's inputs or outputs


def each_module(*models: Any) -> Iterator[Any]:
    """Every module of these models once; `modules()` takes several times as long."""
    pending = list(models)
    seen = set(map(id, pending))
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:  # bool(child) would call its __len__
                seen.add(id(child))
                pending.append(child)


def stock_class(kind: type[T]) -> type[T]:
    """The original of a class that `pipelines/host/hooks.py` swapped in, also of its subclasses; any other itself."""
    return getattr(kind, "_mmspec_stock", None) or kind


def own_class(kind: type[T]) -> type[T]:
    """Like `stock_class`, but the class itself if somebody else subclassed the one that was swapped in."""
    return kind.__dict__.get("_mmspec_stock", kind)


def hooked(module: nn.Module) -> bool:
    """Whether the module has forward (pre-)hooks that may change or keep its inputs or outputs."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return False
    return not all(map(inert, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def inert(hook: object) -> bool:
    """Whether a forward (pre-)hook neither changes nor keeps a module's inputs or outputs."""
    return getattr(hook, "__module__", None) == _INERT or hasattr(hook, LOOKS_ON)


def hooked_everywhere() -> bool:
    """Whether global forward (pre-)hooks are installed, which run for every module."""
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def ambient() -> tuple[Hashable, ...]:
    """Global settings that change the results of operations: the default dtype, and autocast for each device type."""
    casts = filter(torch.is_autocast_enabled, ("cpu", *_accelerators()))
    return (torch.get_default_dtype(), *((kind, torch.get_autocast_dtype(kind)) for kind in casts))


@cache
def _accelerators() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device.type,)


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which tensors of this dtype are multiplied on this device: autocast may change it."""
    kind = device.type
    casts = dtype.is_floating_point and dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else dtype


def for_thread() -> Callable[[], AbstractContextManager[None]]:
    """A function that makes a context in which another thread has this thread's autocast and current CUDA device."""
    casts = [cast for cast in ambient() if isinstance(cast, tuple)]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # asking would initialize it

    @contextmanager
    def there() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype))
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            yield

    return there


@contextmanager
def uncast(device: torch.device) -> Iterator[None]:
    """Turn autocast off for operations on this device."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """Leave inference mode, so that tensors made here may be written in any mode, and read by autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def each_in(mode: Mode, steps: Iterator[T]) -> Iterator[T]:
    """The same steps, each computed in this mode; the caller receives them outside of the mode."""
    end = object()
    while True:
        with mode():
            step = next(steps, end)
        if step is end:
            return
        yield step  # type: ignore[misc]
