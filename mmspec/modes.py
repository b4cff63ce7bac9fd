"""Modes of autograd: rounds run in inference mode, where each operation costs less, and what lasts is made outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

T = TypeVar("T")
Mode = type[AbstractContextManager[None]]
_PLAIN = {Parameter, Tensor, type(None)}
_HOOKS = {"_hf_hook", "_diffusers_hook"}  # attributes of modules whose weights accelerate or diffusers may move
_REWRITTEN = {"dynamic", "longrope"}  # rotary embeddings that write their frequencies anew as the text grows


def mode_of(*models: Any) -> Mode:
    """torch.inference_mode where all these models bear it, else torch.no_grad, as in stock `generate`.

    It may break weights that are tensors of a class of their own, as quantized ones are, and leave its mark on weights
    that are moved and on buffers that are written.
    """
    modules = list(models)
    for module in modules:  # `modules()` would take several times as long
        own = (*module._parameters.values(), *module._buffers.values())
        if not (_PLAIN.issuperset(map(type, own)) and _HOOKS.isdisjoint(vars(module)) and _leaves_buffers(module)):
            return torch.no_grad
        modules += filter(None, module._modules.values())
    return torch.inference_mode


def _leaves_buffers(module: Module) -> bool:
    kinds = vars(module).get("rope_type", "default")  # one, or one for each type of layers
    return _REWRITTEN.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds])


@contextmanager
def lasting() -> Iterator[None]:
    """What is made here, even within inference mode, may be written in any mode, and read by autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def each_in(mode: Mode, steps: Iterator[T]) -> Iterator[T]:
    """The same steps, each made in this mode; whoever takes them is outside of it."""
    end = object()
    while True:
        with mode():
            step = next(steps, end)
        if step is end:
            return
        yield step  # type: ignore[misc]
