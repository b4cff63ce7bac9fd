"""What every kernel asks of its arguments before it trusts their pointers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

PARTS = 64  # that anything is cut into at most
INTERPRETED: bool = triton.knobs.runtime.interpret  # as it was when the kernels were defined
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDEX = (torch.int64,)
BOOL = (torch.bool,)
REAL = (torch.float32,)
DOUBLE = (torch.float64,)
Argument = tuple[Tensor | None, str, tuple[torch.dtype, ...]]


def sizes(op: str, **arguments: Argument) -> dict[str, int]:
    """The length of every named dimension, once all arguments agree on it; None arguments are passed over.

    Args:
        op: who asks, for the message.
        arguments: the tensor, its dimensions as one name each ("B N V"), and the dtypes allowed.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: wrong number of dimensions, a length that an earlier argument has otherwise, another device, or a
            last dimension whose entries do not lie side by side.
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
    """Launch on the tensor's own device, whatever the current one is; an error where no kernel can run."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not INTERPRETED:
        raise RuntimeError(
            f"Triton cannot run on {tensor.device}; use MMSPEC_KERNELS=reference, or set TRITON_INTERPRET=1 before "
            "Python starts to run its interpreter"
        )
    return nullcontext()


def processors(tensor: Tensor) -> int:
    """How many programs run at once, at least."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 2


def splits_for(tensor: Tensor, programs: int, length: int, least: int) -> int:
    """Parts to cut a loop of `length` into, none shorter than `least`, so that two programs meet every processor."""
    wanted = -(-2 * processors(tensor) // max(1, programs))
    return max(1, min(wanted, -(-length // least), PARTS))


def room_for(parts: int) -> int:
    """Of a tile that holds so many parts of a line, the constant length: one of two, so that few kernels are compiled.

    There are many parts only where there are few lines, so the longer one meets small tiles alone.
    """
    return 16 if parts <= 16 else PARTS
