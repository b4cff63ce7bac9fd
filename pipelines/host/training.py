"""What drafters are trained by: accelerate's Accelerator, one for each process."""

from __future__ import annotations

from accelerate import Accelerator

__all__ = ["Accelerator"]
