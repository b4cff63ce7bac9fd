"""Chooses between Triton kernels (on CUDA, if Triton is installed) and the PyTorch definitions; see MMSPEC_KERNELS."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from torch import Tensor

from mmspec.kernels import reference

VARIABLE = "MMSPEC_KERNELS"
TREE_NODES = 256  # limit of the verification kernel, whose [16, nodes] tiles must fit into registers
KERNELS = {  # operation: the module with its Triton kernel; the definition is in `reference`
    "uniform": "noise",
    "tree_attention": "attention",
    "compact_rows": "rows",
    "draw": "verify",
    "verify_point_mass": "verify",
    "residual_sample": "residual",
    "lantern_accept": "relaxed",
    "logit_window": "relaxed",
    "gaussian_path": "gaussian",
}


@lru_cache(maxsize=64)
def chosen(operation: str, device: str, setting: str) -> Callable[..., Any]:
    """The function that runs an operation on a type of device; `setting` is the value of MMSPEC_KERNELS.

    Raises:
        ValueError: an unknown setting.
        ImportError: the setting is `triton`, which cannot be imported.
    """
    if setting not in ("", "auto", "reference", "triton"):
        raise ValueError(f"{VARIABLE}={setting!r} is not known; choose reference or triton, or leave it unset")
    if setting == "triton" or (device == "cuda" and setting != "reference" and _installed()):
        module: Any = importlib.import_module(f"mmspec.kernels.{KERNELS[operation]}")
    else:
        module = reference
    function: Callable[..., Any] = getattr(module, operation)
    return function


@lru_cache(maxsize=1)
def _installed() -> bool:
    """Whether Triton can be imported; warns once if not, as with torch for Windows."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        warnings.warn(f"mmspec runs without its kernels, which is slower: {error}; install triton", stacklevel=2)
        return False
    return True


def _on(tensor: Any) -> str:
    while isinstance(tensor, list | tuple):
        tensor = tensor[0] if tensor else None
    return tensor.device.type if isinstance(tensor, Tensor) else ""


def _operation(name: str, fits: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """A wrapper that calls the chosen function; the definition if the arguments do not fit a kernel, unless forced."""
    definition = getattr(reference, name)

    @wraps(definition)
    def run(first: Any, *rest: Any, **named: Any) -> Any:
        setting = os.environ.get(VARIABLE, "")
        if fits is not None and setting in ("", "auto") and not fits(first, *rest, **named):
            setting = "reference"
        return chosen(name, _on(first), setting)(first, *rest, **named)

    return run


def defined(operation: str, tensor: Tensor) -> bool:
    """Whether an operation runs by its definition, not by a kernel, on this tensor's device."""
    return chosen(operation, tensor.device.type, os.environ.get(VARIABLE, "")) is getattr(reference, operation)


def _few_nodes(logits: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor | None, u: Tensor) -> bool:
    return ancestors is None or tokens.shape[1] <= TREE_NODES


uniform = _operation("uniform")
tree_attention = _operation("tree_attention")
compact_rows = _operation("compact_rows")
draw = _operation("draw")
verify_point_mass = _operation("verify_point_mass", _few_nodes)
residual_sample = _operation("residual_sample")
lantern_accept = _operation("lantern_accept")
logit_window = _operation("logit_window")
gaussian_path = _operation("gaussian_path")
