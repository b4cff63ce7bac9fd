"""Which mode of autograd the rounds of a model run under, as far as libraries and hooks allow it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mmspec.modes import Mode, each_module, hooked, hooked_everywhere

_PLAIN = {Parameter, Tensor, type(None)}
_HOOKS = {"_hf_hook", "_diffusers_hook"}  # attributes of modules whose weights accelerate or diffusers may move
_REWRITTEN = {"dynamic", "longrope"}  # rotary embeddings that write their frequencies anew as the text grows
_KNOWN = {"torch", "transformers", "diffusers", "mmspec"}  # modules of other packages may keep what they compute


def mode_of(*models: Module) -> Mode:
    """torch.inference_mode where all these models work under it, else torch.no_grad, as in stock `generate`.

    Inference mode may break weights of tensor subclasses, such as quantized ones. It would also turn weights that are
    moved, buffers that are written, and tensors that hooks or unknown modules keep into inference tensors.
    """
    if hooked_everywhere() or not all(_bears(module) for module in each_module(*models)):
        return torch.no_grad
    return torch.inference_mode


def _bears(module: Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    held = vars(module)
    return (
        _PLAIN.issuperset(map(type, own))
        and all(t is None or t.layout is torch.strided for t in own)
        and _HOOKS.isdisjoint(held)
        and "forward" not in held
        and type(module).__module__.partition(".")[0] in _KNOWN
        and not hooked(module)
        and _leaves_buffers(module)
    )


def _leaves_buffers(module: Module) -> bool:
    kinds = vars(module).get("rope_type", "default")  # one, or one for each type of layers
    return _REWRITTEN.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds])
