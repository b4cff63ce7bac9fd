"""The supported models: which tests prove identical, which family a class has, and how wrapped models are found."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from mmspec.pipelines.families.surveyed import FOUND, VERSION
from mmspec.pipelines.host import adapters, loading, release
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.names import has
from mmspec.registry import RULES, drafters

if TYPE_CHECKING:  # `mmspec.supported` does not need these imports
    from mmspec.pipelines.patching.family import Family

# model_type → what the tests prove to be token-identical
PROVED: dict[str, str] = {
    "llava": "LLaVA-1.5: images",
    "llava_next": "LLaVA-NeXT: images, anyres tiles",
    "qwen2_vl": "Qwen2-VL: images, videos, M-RoPE",
    "qwen2_5_vl": "Qwen2.5-VL: images, videos, M-RoPE",
    "qwen3_vl": "Qwen3-VL: images, videos, interleaved M-RoPE",
    "qwen3_5": "Qwen3.5, Qwen3.6: images, videos, gated delta layers, interleaved M-RoPE",
    "lfm2_vl": "LFM2-VL: images, short convolutions",
    "smolvlm": "SmolVLM: images",
    "idefics3": "Idefics3: images",
    "internvl": "InternVL: images",
    "paligemma": "PaliGemma: images",
    "gemma3": "Gemma3: images, sliding windows",
}

# model_type, or diffusers pipeline → how it generates images, also token-identical
PICTURES: dict[str, str] = {
    "janus": 'Janus, Janus-Pro: generate(generation_mode="image"), guided',
    "emu3": "Emu3: generate with prefix_allowed_tokens_fn (marked mmspec_pure), negative_prompt_ids and guidance_scale",
    "glm_image": "GLM-Image: generate, and GlmImagePipeline unchanged",
    "chameleon": 'Chameleon, Anole: generate(multimodal_generation_mode="image-only"), guided or not; ours, as below',
    "emu3_5": "Emu3.5, loaded as Qwen3ForCausalLM: generate with its authors' logits processor, one picture a call",
    "lumina_mgpt": "Lumina-mGPT, 2.0: generate with its authors' logits processors, one picture a call",
    "llamagen": "LlamaGenPipeline: class- and text-conditional, guided; ours, as below",
}

# class of a model or pipeline → its family, as module:class; all others are DecoderOnly
FAMILIES: dict[str, str] = {
    "JanusForConditionalGeneration": "families.janus:Janus",
    "Emu3ForConditionalGeneration": "families.drawing:Emu3",
    "GlmImageForConditionalGeneration": "families.drawing:GlmImage",
    "ChameleonForConditionalGeneration": "families.chameleon:Chameleon",
    "LlamaGenPipeline": "families.llamagen:LlamaGen",
    "MARPipeline": "mar.pipeline:Mar",
}
_USUAL = "families.decoder_only:DecoderOnly"

# diffusers pipeline, or a model whose `generate` delegates → the component that generates its tokens
COMPONENTS: dict[str, str] = {
    "GlmImagePipeline": "vision_language_encoder",
    "Blip2ForConditionalGeneration": "language_model",
    "InstructBlipForConditionalGeneration": "language_model",
    "InstructBlipVideoForConditionalGeneration": "language_model",
    "Qwen2_5OmniForConditionalGeneration": "thinker",
    "Qwen3OmniMoeForConditionalGeneration": "thinker",
}


def _entry(thing: object, table: dict[str, str]) -> str | None:
    """The entry of a table for the class of `thing`, or for its nearest base class."""
    return next((table[cls.__name__] for cls in type(thing).__mro__ if cls.__name__ in table), None)


def of(model: object) -> Family:
    """The family of a model or pipeline; its module is imported on demand."""
    module, _, name = (_entry(model, FAMILIES) or _USUAL).partition(":")
    return getattr(importlib.import_module(f"mmspec.pipelines.{module}"), name)()


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
    if not hasattr(layers[-1], "generate") and _entry(layers[-1], FAMILIES) is None:
        raise TypeError(
            f"mmspec needs a transformers model or a pipeline that generates tokens; got "
            f"{type(model_or_pipe).__name__}. mmspec.supported() lists what works"
        )
    return layers


def outer(model_or_pipe: object) -> Any:
    """The object whose `generate` takes what a processor returns: the one to patch, or a BLIP around it, which encodes
    the pictures first."""
    layers = unwrap_all(model_or_pipe)
    encodes = (one for one in layers if hasattr(type(one), "generate") and has(type(one).generate, "pixel_values"))
    return next(encodes, layers[-1])


def _inside(wrapper: Any) -> object:
    """The object inside a wrapper or a pipeline; None: it is neither."""
    component = _entry(wrapper, COMPONENTS)
    if component is not None:
        return getattr(wrapper, component)
    if _entry(wrapper, FAMILIES) is not None:
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
    if not isinstance(parts, dict) or not any(map(_generates, type(pipe).__mro__)):
        return None
    writers = {name: part for name, part in parts.items() if getattr(part, "can_generate", bool)() is True}
    if len(writers) > 1:
        raise TypeError(
            f"{type(pipe).__name__} has several models that can generate: {', '.join(writers)}; enable one of them, "
            f"such as pipe.{next(iter(writers))}"
        )
    return next(iter(writers.values()), None)


def _generates(cls: type) -> bool:
    try:
        return ".generate(" in inspect.getsource(cls)
    except (OSError, TypeError):  # a class without a file
        return False


def untested() -> list[str]:
    """The image-text-to-text classes of the installed transformers that the survey did not try."""
    return sorted(loading.WITH_PICTURES - FOUND.keys())


def supported() -> str:
    """Print and return the model families that are proved identical, the drafters and the rules, one per line."""
    lines = [
        "Proved token-identical to stock generate (greedy, fp32, sdpa and eager, one row and four of unequal length):"
    ]
    lines += [f"  {kind:12s} {what}" for kind, what in PROVED.items()]
    lines += ["Pictures, token-identical likewise (greedy, and sampling with reproducible=True; fp32):"]
    lines += [f"  {kind:12s} {what}" for kind, what in PICTURES.items()]
    lines += ["  (ours: stock has no such call; identical to decoding one token after the other)"]
    lines += ["Pictures of continuous tokens, in distribution (by pipe.enable_speculation(), not by mmspec.enable):"]
    lines += ["  mar          MARPipeline: class-conditional, guided; ours"]
    failing = [name for name, why in FOUND.items() if why and why.startswith("stock generate fails")]
    refused = [name for name, why in FOUND.items() if why is not None and name not in failing]
    unknown, same = untested(), len(FOUND) - len(refused) - len(failing)
    lines += [f"Of {len(FOUND)} image-text-to-text classes of transformers {VERSION}, {same} are token-identical:"]
    lines += [f"  docs/models.md lists them. Refused: {', '.join(refused)}"]
    lines += [f"  Failing in transformers itself: {', '.join(failing)}"] if failing else []
    lines += [f"  Untested, of transformers {release.installed()}: {', '.join(unknown)}"] if unknown else []
    lines += ["Any other decoder-only model with full or sliding attention is checked when it is enabled.", "Drafters:"]
    lines += [f"  {name:12s} {what}" for name, what in drafters().items()]
    lines += ["Rules:", *(f"  {name}" for name in RULES)]
    text = "\n".join(lines)
    print(text)
    return text
