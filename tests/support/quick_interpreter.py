"""Triton's interpreter in two thirds of its time: it prepares its language once for a kernel, not for each function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def install() -> None:
    """For all kernels of this process; nothing happens without Triton, or if its interpreter works in another way."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _once(interpreter._patch_lang, (tl, tl.core))


def _once(prepare: Callable[[Any], Any], languages: tuple[Any, ...]) -> Callable[[Any], SimpleNamespace]:
    """`prepare`, which does nothing for modules that are prepared; `restore` of what it returns undoes it."""
    prepared: set[frozenset[int]] = set()

    def once(function: Any) -> SimpleNamespace:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value) and value in languages]
        key = frozenset(map(id, modules))
        if key in prepared:
            return SimpleNamespace(restore=lambda: None)
        prepared.add(key)
        scope = prepare(function)
        return SimpleNamespace(restore=lambda: (prepared.clear(), scope.restore()))

    return once
