"""The supported models: which tests prove identical, and which family a class has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mmspec.pipelines.families.surveyed import FOUND, VERSION
from mmspec.pipelines.host import loading, release
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


def of(model: object) -> Family:
    """The family of a model or pipeline; its module is imported on demand."""
    named = (FAMILIES[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in FAMILIES)
    module, _, name = next(named, _USUAL).partition(":")
    return getattr(importlib.import_module(f"mmspec.pipelines.{module}"), name)()


def untested() -> list[str]:
    """The image-text-to-text classes of the installed transformers that the survey did not try."""
    return sorted(loading.WITH_PICTURES - FOUND.keys())


def supported() -> None:
    """Print the model families that are proved identical, the drafters and the rules, one per line."""
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
    print("\n".join(lines))
