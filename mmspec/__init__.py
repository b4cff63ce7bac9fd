"""mmspec: lossless speculative decoding for Hugging Face vision-language and autoregressive image models."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

__version__ = "0.2.0"

# In a checkout, mmspec.pipelines, mmspec.kernels and mmspec.app are next to this folder; in a wheel they are inside it.
_root = pathlib.Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

_FACE = {
    **dict.fromkeys(("enable", "disable", "stats", "refresh"), "mmspec.pipelines.patch"),
    "verify": "mmspec.pipelines.serving.verify",
    "stream": "mmspec.pipelines.serving.stream",
    "Handle": "mmspec.pipelines.patching.handle",
    "Report": "mmspec.pipelines.serving.verify",
    "SpecConfig": "mmspec.config",
    "Stats": "mmspec.statistics",
    "Step": "mmspec.pipelines.serving.stream",
    "UnsupportedError": "mmspec.config",
    "supported": "mmspec.pipelines.families.table",
    "json_grammar": "mmspec.pipelines.host.processors.grammar",
    "load_drafter": "mmspec.pipelines.host.loading",
    "save_drafter": "mmspec.checkpoints.save",
    "push_drafter": "mmspec.checkpoints.save",
    "LlamaGenPipeline": "mmspec.pipelines.llamagen.pipeline",
    "MARPipeline": "mmspec.pipelines.mar.pipeline",
}

__all__ = ["__version__", *_FACE]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used (PEP 562), so that `import mmspec` is fast."""
    if name not in _FACE:
        raise AttributeError(f"module 'mmspec' has no attribute '{name}'; it offers {', '.join(__all__)}")
    try:
        return getattr(importlib.import_module(_FACE[name]), name)
    except (ImportError, AttributeError) as error:
        return importlib.import_module("mmspec.pipelines.host.release").missing(name, error)
