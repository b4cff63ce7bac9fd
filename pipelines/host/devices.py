"""Where a model runs, in which autograd mode, and whether processes share it, by its weights, modules and hooks."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, distributed
from torch.nn import Module, Parameter

from mmspec.modes import Mode, each_module, hooked, hooked_everywhere
from mmspec.protocols import TargetInfo

_PLAIN = {Parameter, Tensor, type(None)}
_HOOKS = {"_hf_hook", "_diffusers_hook"}  # attributes of modules whose weights accelerate or diffusers may move
_REWRITTEN = {"dynamic", "longrope"}  # rotary embeddings that overwrite their frequencies as the text grows
_PACKAGES = {"torch", "transformers", "diffusers", "mmspec"}  # modules of other packages may store their results


def execution(module: Module) -> torch.device:
    """The device that a module runs on: that of its accelerate or diffusers hook, else that of its weights."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):  # one, or several in a SequentialHook
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if weight is None else weight.device


def wake(module: Module) -> None:
    """Move an offloaded module of diffusers to its device, as a call of `forward` would."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)


def moved(before: TargetInfo, now: TargetInfo) -> bool:
    """Whether a target's device or dtype has changed."""
    return (before.device, before.dtype) != (now.device, now.dtype)


def shared(model: object) -> bool:
    """Whether several processes have parts of the model's weights, so that they have to run the same forwards."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return True
    return isinstance(model, Module) and any(hasattr(weight, "device_mesh") for weight in model.parameters())


def agreed(model: object, numbers: list[int]) -> list[int]:
    """The first process's numbers, in all processes that share a model: rows have to draw the same tokens in each."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or not shared(model):
        return numbers
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    common = torch.tensor(numbers, device=mesh.device_type)
    distributed.broadcast(common, group=mesh.get_group(), group_src=0)
    return common.tolist()


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
