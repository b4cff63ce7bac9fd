"""The mode that rounds run in: no more of autograd than the weights need."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = {Parameter, Tensor, type(None)}


def inference(model: Any) -> type[AbstractContextManager[None]]:
    """torch.inference_mode, in which each operation costs less.

    Weights that are tensors of a class of their own, as quantized ones, and weights that accelerate moves about may
    break in it: they get torch.no_grad, as in stock `generate`.
    """
    modules = [model]
    for module in modules:  # `model.modules()` would take several times as long
        own = (*module._parameters.values(), *module._buffers.values())
        if "_hf_hook" in vars(module) or not _PLAIN.issuperset(map(type, own)):
            return torch.no_grad
        modules += filter(None, module._modules.values())
    return torch.inference_mode
