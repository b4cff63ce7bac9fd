"""Modes of autograd: rounds run in inference mode, where each operation costs less, and what lasts is made outside."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as everywhere

T = TypeVar("T")
Mode = type[AbstractContextManager[None]]
_INERT = "transformers.utils.output_capturing"  # its hooks stay once installed, and sleep unless a call asks for them
LOOKS_ON = "mmspec_looks_on"  # a hook that has this attribute takes nothing, changes nothing and keeps nothing


def each_module(*models: Any) -> Iterator[Any]:
    """Every module of these once; `modules()` takes several times as long."""
    pending = list(models)
    seen = set(map(id, pending))
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:  # bool(child) would call its __len__
                seen.add(id(child))
                pending.append(child)


def stock_class(kind: type[T]) -> type[T]:
    """The class that a swap put another in front of (`pipelines/host/hooks.py`); of any other class itself."""
    return getattr(kind, "_mmspec_stock", None) or kind


def hooked(module: nn.Module) -> bool:
    """Whether hooks run before or after its forward that may change or keep what it computes."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return False
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(getattr(hook, "__module__", None) != _INERT and not hasattr(hook, LOOKS_ON) for hook in hooks)


def hooked_everywhere() -> bool:
    """Whether hooks run before or after the forward of any module there is."""
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def ambient() -> tuple[Hashable, ...]:
    """What changes operations from around them: autocast, by type of device, and the dtype of what is made new."""
    casts = filter(torch.is_autocast_enabled, ("cpu", *_accelerators()))
    return (torch.get_default_dtype(), *((kind, torch.get_autocast_dtype(kind)) for kind in casts))


@cache
def _accelerators() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device.type,)


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What float tensors of this dtype are multiplied in on this device: autocast may say otherwise."""
    kind = device.type
    casts = dtype.is_floating_point and dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else dtype


@contextmanager
def uncast(device: torch.device) -> Iterator[None]:
    """Operations on this device are run as they are written, even within autocast."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """What is made here, even within inference mode, may be written in any mode, and read by autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def each_in(mode: Mode, steps: Iterator[T]) -> Iterator[T]:
    """The same steps, each computed in this mode; between them the caller is outside of it."""
    end = object()
    while True:
        with mode():
            step = next(steps, end)
        if step is end:
            return
        yield step  # type: ignore[misc]
