"""Chooses the autograd mode of a model's rounds: inference mode if its modules and hooks support it, else no_grad."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mmspec.modes import Mode, each_module, hooked, hooked_everywhere

_PLAIN = {Parameter, Tensor, type(None)}
_HOOKS = {"_hf_hook", "_diffusers_hook"}  # attributes of modules whose weights accelerate or diffusers may move
_REWRITTEN = {"dynamic", "longrope"}  # rotary embeddings that overwrite their frequencies as the text grows
_PACKAGES = {"torch", "transformers", "diffusers", "mmspec"}  # modules of other packages may store their results


def mode_of(*models: Module) -> Mode:
    """torch.inference_mode if all these models work under it, else torch.no_grad, as in stock `generate`.

    Inference mode may break weights of tensor subclasses, such as quantized ones. It would also turn weights that are
    moved, buffers that are written, and tensors that hooks or unknown modules store into inference tensors.
    """
    if hooked_everywhere() or not all(_supports_inference(module) for module in each_module(*models)):
        return torch.no_grad
    return torch.inference_mode


def _supports_inference(module: Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    attributes = vars(module)
    return (
        _PLAIN.issuperset(map(type, own))
        and all(t is None or t.layout is torch.strided for t in own)
        and _HOOKS.isdisjoint(attributes)
        and "forward" not in attributes
        and type(module).__module__.partition(".")[0] in _PACKAGES
        and not hooked(module)
        and _keeps_buffers(module)
    )


def _keeps_buffers(module: Module) -> bool:
    kinds = vars(module).get("rope_type", "default")  # a string, or a dict by layer type
    return _REWRITTEN.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds])
