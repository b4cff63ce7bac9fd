"""Checks of the arguments of Triton kernels, which use their pointers, and helpers for launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

PARTS = 64  # limit on the parts that a loop is split into
INTERPRETED: bool = triton.knobs.runtime.interpret  # its value when the kernels were defined
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDEX = (torch.int64,)
BOOL = (torch.bool,)
REAL = (torch.float32,)
DOUBLE = (torch.float64,)
Argument = tuple[Tensor | None, str, tuple[torch.dtype, ...]]


def sizes(op: str, **arguments: Argument) -> dict[str, int]:
    """The length of every named dimension, after checking that all arguments agree; None arguments are skipped.

    Args:
        op: name of the operation, for the message.
        arguments: the tensor, the names of its dimensions ("B N V"), and the allowed dtypes.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: wrong number of dimensions, a length that differs from an earlier argument's, another device, or a
            last dimension that is not contiguous.
    """
    numbers: dict[str, int] = {}
    came_from: dict[str, str] = {}
    device = None
    for name, (tensor, form, dtypes) in arguments.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor [{form}], got {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise TypeError(f"{op}: {name} is {tensor.dtype}; allowed: {allowed}")
        letters, shape = form.split(), list(tensor.shape)
        if len(letters) != len(shape):
            raise ValueError(f"{op}: {name} is {shape}, expected [{', '.join(letters)}]")
        for letter, length in zip(letters, shape, strict=True):
            if numbers.setdefault(letter, length) != length:
                raise ValueError(
                    f"{op}: {name} is {shape}, expected [{', '.join(letters)}] with {letter} = {numbers[letter]} as in "
                    f"{came_from[letter]}"
                )
            came_from.setdefault(letter, name)
        if device is None:
            device, first = tensor.device, name
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, {first} on {device}; move them to one device")
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{op}: the last dimension of {name} has stride {tensor.stride(-1)}; make it contiguous")
    return numbers


def at_home(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one for a launch; raises a RuntimeError if kernels cannot run there."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not INTERPRETED:
        raise RuntimeError(
            f"Triton cannot run on {tensor.device}; use MMSPEC_KERNELS=reference, or set TRITON_INTERPRET=1 before "
            "Python starts to run its interpreter"
        )
    return nullcontext()


def processors(tensor: Tensor) -> int:
    """The number of processors of the device: at least so many programs run at once."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 2


def splits_for(tensor: Tensor, programs: int, length: int, least: int) -> int:
    """Number of parts to split a loop of `length` into, none shorter than `least`, for two programs per processor."""
    wanted = -(-2 * processors(tensor) // max(1, programs))
    return max(1, min(wanted, -(-length // least), PARTS))


def room_for(parts: int) -> int:
    """The constant length of a tile with this many parts of a line: one of two, so that few kernels are compiled.

    There are many parts only if there are few lines, so the longer one is used only with small tiles.
    """
    return 16 if parts <= 16 else PARTS
