"""Finds the model to patch inside pipelines, adapters, compiled modules, and models that delegate their `generate`."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from mmspec.pipelines.host import adapters
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.names import has

# diffusers pipeline, or a model whose `generate` delegates → the component that generates its tokens
COMPONENTS: dict[str, str] = {
    "GlmImagePipeline": "vision_language_encoder",
    "Blip2ForConditionalGeneration": "language_model",
    "InstructBlipForConditionalGeneration": "language_model",
    "InstructBlipVideoForConditionalGeneration": "language_model",
    "Qwen2_5OmniForConditionalGeneration": "thinker",
    "Qwen3OmniMoeForConditionalGeneration": "thinker",
}
NEEDED = (
    "mmspec needs a transformers model or a pipeline that generates tokens; got {}. mmspec.supported() lists what works"
)
OURS = {"LlamaGenPipeline", "MARPipeline"}  # mmspec's own pipelines, which are patched themselves


def _names(thing: object) -> list[str]:
    """The names of its class and of the base classes."""
    return [cls.__name__ for cls in type(thing).__mro__]


def _ours(thing: object) -> bool:
    return not OURS.isdisjoint(_names(thing))


def unwrap(model_or_pipe: object) -> Any:
    """The object to patch: the model inside a pipeline or a wrapper, or one of mmspec's pipelines; see `unwrap_all`."""
    return unwrap_all(model_or_pipe)[-1]


def unwrap_all(model_or_pipe: object) -> list[Any]:
    """The object itself, the object inside it, and so on; the last one is the object to patch.

    Raises:
        TypeError: none of these generates tokens.
    """
    layers = [model_or_pipe]
    while (inner := _inside(layers[-1])) is not None:
        layers.append(inner)
    if not hasattr(layers[-1], "generate") and not _ours(layers[-1]):
        raise TypeError(NEEDED.format(type(model_or_pipe).__name__))
    return layers


def check_pipeline(cls: type) -> None:
    """Raise TypeError for a class of diffusers pipelines none of which generates tokens, before one is loaded."""
    if not _generates(cls) and COMPONENTS.keys().isdisjoint(one.__name__ for one in cls.__mro__):
        raise TypeError(NEEDED.format(cls.__name__))


def outer(model_or_pipe: object) -> Any:
    """The object whose `generate` takes what a processor returns: the one to patch, or a BLIP around it, which encodes
    the pictures first."""
    layers = unwrap_all(model_or_pipe)
    encodes = (one for one in layers if hasattr(type(one), "generate") and has(type(one).generate, "pixel_values"))
    return next(encodes, layers[-1])


def called(model_or_pipe: object) -> Any:
    """The object whose `generate` a user calls: a PEFT wrapper, which prepares its adapters, else `outer`."""
    wrapped = (one for one in unwrap_all(model_or_pipe) if adapters.inside(one) is not None)
    return next(wrapped, outer(model_or_pipe))


def _inside(wrapper: Any) -> object:
    """The object inside a wrapper or a pipeline; None: it is neither."""
    component = next((COMPONENTS[name] for name in _names(wrapper) if name in COMPONENTS), None)
    if component is not None:
        return getattr(wrapper, component)
    if _ours(wrapper):
        return None
    if hasattr(wrapper, "_orig_mod"):  # torch.compile; its `generate` is the model's, and depends on the model's class
        return wrapper._orig_mod
    if (adapted := adapters.inside(wrapper)) is not None:
        return adapted
    if hasattr(wrapper, "generate"):
        return None
    writer = _writer(wrapper)  # a diffusers pipeline
    return writer if writer is not None else getattr(wrapper, "model", None)  # transformers.pipeline


def _writer(pipe: object) -> GenerativeModel | None:
    """The component of a diffusers pipeline that generates tokens, for example to extend a prompt; None: none does.

    It is the one that can generate, if the pipeline's own code calls a `generate` at all; most pipelines use their
    language models only as encoders.

    Raises:
        TypeError: several components can generate.
    """
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, dict) or not _generates(type(pipe)):
        return None
    writers = {name: part for name, part in parts.items() if getattr(part, "can_generate", bool)() is True}
    if len(writers) > 1:
        raise TypeError(
            f"{type(pipe).__name__} has several models that can generate: {', '.join(writers)}; enable one of them, "
            f"such as pipe.{next(iter(writers))}"
        )
    return next(iter(writers.values()), None)


def _generates(cls: type) -> bool:
    """Whether the code of a class, or of one that it extends, calls a `generate`."""
    for one in cls.__mro__:
        with contextlib.suppress(OSError, TypeError):  # a class without a file
            if ".generate(" in inspect.getsource(one):
                return True
    return False
