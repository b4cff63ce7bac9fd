"""The plugin for lmms-eval: the entry point `lmms_eval.models` names `manifest`; no other module is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """The model `mmspec`, for tasks with chat messages."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("mmspec", chat_class_path="mmspec.app.bench.lmms.Mmspec")
