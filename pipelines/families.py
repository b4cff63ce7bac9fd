"""Which models can be accelerated: judged by what they can do; the table says which are proved identical by tests."""

from __future__ import annotations

import inspect
from typing import Any

from mmspec.registry import drafters
from mmspec.types import TargetInfo

# model_type → what the tests prove token-identical
PROVED: dict[str, str] = {
    "llava": "LLaVA-1.5: images",
    "llava_next": "LLaVA-NeXT: images, anyres tiles",
    "qwen2_vl": "Qwen2-VL: images, videos, M-RoPE",
    "qwen2_5_vl": "Qwen2.5-VL: images, videos, M-RoPE",
    "qwen3_vl": "Qwen3-VL: images, videos, interleaved M-RoPE",
    "smolvlm": "SmolVLM: images",
    "idefics3": "Idefics3: images",
    "internvl": "InternVL: images",
    "paligemma": "PaliGemma: images",
    "gemma3": "Gemma3: images, sliding windows",
}

_LAYERS = {"full_attention", "sliding_attention"}
_ATTENTION = {"sdpa", "eager"}


def unwrap(model_or_pipe: Any) -> Any:
    """The transformers model inside a pipeline or a PEFT wrapper.

    Raises:
        TypeError: nothing in there generates.
    """
    found = model_or_pipe
    if hasattr(found, "get_base_model"):  # PEFT
        found = found.get_base_model()
    if not hasattr(found, "generate") and hasattr(found, "model"):  # transformers.pipeline
        return unwrap(found.model)
    if not hasattr(found, "generate"):
        raise TypeError(
            f"mmspec needs a transformers model or pipeline that generates; got {type(model_or_pipe).__name__}. "
            "mmspec.supported() lists what works"
        )
    return found


def unsupported(model: Any) -> str | None:
    """Why this model cannot be accelerated, or None."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; only decoder-only models are supported"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot be rolled back after a rejected draft"
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model or not hasattr(decoder, "layers"):
        return "get_decoder() does not give a text decoder with layers"
    if model.get_output_embeddings() is None:
        return "get_output_embeddings() gives no head"
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "its decoder takes no position_ids, which the nodes of a tree need"
    layers = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    if layers - _LAYERS:
        return f"it has {', '.join(sorted(layers - _LAYERS))} layers, whose state cannot be rolled back to a tree node"
    attention = decoder.config._attn_implementation
    if attention not in _ATTENTION:
        return (
            f"its attention is {attention!r}, which takes no tree mask; load it with attn_implementation='sdpa' "
            f"(allowed: {', '.join(sorted(_ATTENTION))})"
        )
    return None


def describe(model: Any) -> TargetInfo:
    """What a drafter has to fit."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return TargetInfo(
        name=getattr(model.config, "_name_or_path", "") or type(model).__name__,
        vocab=head.weight.shape[0],
        hidden=head.weight.shape[1],
        embedding=embedding.weight.shape[-1],
        layers=len(model.get_decoder().layers),
        device=embedding.weight.device,
        dtype=model.dtype,
    )


def supported() -> str:
    """Print, and return, the matrix of model families and drafters."""
    lines = ["Proved token-identical to stock generate (greedy, fp32, sdpa and eager, batch 1 and ragged 4):"]
    lines += [f"  {kind:12s} {what}" for kind, what in PROVED.items()]
    lines += ["Any other decoder-only model with full or sliding attention is judged when it is enabled.", "Drafters:"]
    lines += [f"  {name:12s} {what}" for name, what in drafters().items()]
    text = "\n".join(lines)
    print(text)
    return text
