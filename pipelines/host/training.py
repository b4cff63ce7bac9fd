"""The class of accelerate that training uses, one instance for each process."""

from __future__ import annotations

from accelerate import Accelerator

__all__ = ["Accelerator"]
