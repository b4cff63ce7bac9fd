"""What training uses of accelerate: its class, one instance for each process, and the device of a process."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator

__all__ = ["Accelerator", "own_device"]


def own_device() -> torch.device | None:
    """The device that accelerate gives to this process, where several were launched."""
    return Accelerator().device if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
