"""Which device a model runs on, and whether processes share it: weights, offloading hooks, tensor parallelism."""

from __future__ import annotations

from itertools import chain

import torch
from torch import distributed

from mmspec.protocols import TargetInfo


def execution(module: torch.nn.Module) -> torch.device:
    """The device that a module runs on: that of its accelerate or diffusers hook, else that of its weights."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):  # one, or several in a SequentialHook
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if weight is None else weight.device


def wake(module: torch.nn.Module) -> None:
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
    return isinstance(model, torch.nn.Module) and any(hasattr(weight, "device_mesh") for weight in model.parameters())


def agreed(model: object, numbers: list[int]) -> list[int]:
    """The first process's numbers, in all processes that share a model: rows have to draw the same tokens in each."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or not shared(model):
        return numbers
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    common = torch.tensor(numbers, device=mesh.device_type)
    distributed.broadcast(common, group=mesh.get_group(), group_src=0)
    return common.tolist()
