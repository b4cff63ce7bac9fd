"""Lets `DiffusionPipeline.from_pretrained` find our pipelines; diffusers is not imported before somebody else does."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

PIPELINES = {  # diffusers looks a pipeline's class up in itself
    "LlamaGenPipeline": "mmspec.pipelines.llamagen",
    "MARPipeline": "mmspec.pipelines.mar",
}


def register() -> None:
    """Add PIPELINES to the lazy attributes of diffusers, now or once it is imported."""
    if "diffusers" in sys.modules:
        _extend(sys.modules["diffusers"])
    else:
        sys.meta_path.insert(0, _OnImport())  # type: ignore[arg-type]


def _extend(diffusers: ModuleType) -> None:
    lazy: Any = type(diffusers)

    class Extended(lazy):
        def __getattr__(self, name: str) -> Any:
            if name in PIPELINES:
                return getattr(importlib.import_module(PIPELINES[name]), name)
            return super().__getattr__(name)

    diffusers.__class__ = Extended


class _OnImport:
    """A finder that leaves diffusers to the other finders, and extends it as soon as it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "diffusers":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _extend(sys.modules[name])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
