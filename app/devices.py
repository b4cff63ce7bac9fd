"""Finds devices, dtypes and models by name, measures free memory, and explains why a model cannot be loaded."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from textwrap import shorten

import torch

from mmspec.app import embedded
from mmspec.app.extras import EngineError as EngineError  # also for those who import it from here


def first_line(error: Exception) -> str:
    """Class and first line of an error, for messages, and what follows if that line ends with a colon."""
    line = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {shorten(str(error), 400) if line.endswith(':') else line}"


def free_memory(device: torch.device) -> int | None:
    """Free bytes on the device; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is the accelerator if there is one, else the CPU."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EngineError(f"no device {name!r} here; choose auto, cpu, cuda, cuda:1 or mps") from error


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    usual = "float32" if device.type == "cpu" else "bfloat16"
    return getattr(torch, usual if name == "auto" else name)  # type: ignore[no-any-return]


def find_model(name: str) -> str:
    """The folder of an embedded model, a folder, or a name on the Hub.

    Raises EngineError: it is none of these, or the embedded weights are missing.
    """
    try:
        where = embedded.resolve(name)
    except FileNotFoundError as error:
        raise EngineError(f"cannot load the model {name!r}. {error}") from error
    if not Path(where).exists() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise EngineError(f"there is no folder {name!r}. A name on the Hub has the form owner/name")
    return where


def load_quietly(*libraries: str) -> None:
    """Import `transformers` or `diffusers` without progress bars and warnings."""
    for library in libraries:
        logging = importlib.import_module(f"{library}.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
