"""Finds a model's text decoder, head and embedding, the shape of the decoder's layers, and which need special code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmspec.modes import each_module
from mmspec.pipelines.host import recurrent
from mmspec.pipelines.host.exotic import path_readers
from mmspec.pipelines.host.hooks import hides, stock
from mmspec.pipelines.host.kinds import GenerativeModel, TextDecoder, Weighted
from mmspec.pipelines.host.names import origin

# Python modules whose layers choose one scale for their whole input
_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic", "torch.nn.quantized.dynamic")
_ONE_SCALE = (
    "quantize their input with one scale for all tokens of a forward (quantize_dynamic, or torchao with PerTensor)",
    "quantize only the weights, or with one scale for each token",
)
_COLUMNS = (
    "keep some columns of their input in 16 bits, chosen by all tokens of a forward (bitsandbytes in 8 bits)",
    "load the model with llm_int8_threshold=0.0, or in 4 bits",
)


def decoder(model: GenerativeModel) -> TextDecoder:
    """The module with the text layers; if `get_decoder` returns a whole language model, the decoder inside it."""
    found: Any = model.get_decoder()
    return found if hasattr(found, "layers") else getattr(found, "model", found)


def wrapped(model: GenerativeModel) -> str | None:
    """Why the model's decoder cannot be followed: it is inside a module of its own that `torch.compile` made, which
    calls the decoder's stock class; None: it is not."""
    text, parts = decoder(model), (module._modules for module in each_module(model))
    if "_orig_mod" in text._modules or any(part.get("_orig_mod") is text for part in parts):
        return (
            "torch.compile(decoder) hides its decoder; compile it in place with decoder.compile(), or the whole model"
        )
    return None


def head(model: GenerativeModel) -> Weighted | None:
    """The head of the model, or of the language model inside it, that computes logits; None: there is none."""
    own, inner = model.get_output_embeddings(), getattr(model, "language_model", model)
    return inner.get_output_embeddings() if own is None and hasattr(inner, "get_output_embeddings") else own


def embedding(model: GenerativeModel) -> Weighted:
    """The embedding of token ids."""
    return model.get_input_embeddings()


def dtype_of(model: GenerativeModel) -> torch.dtype:
    """The dtype of the decoder's features; that of the model is its first parameter's, often the vision tower's."""
    own: torch.dtype = embedding(model).weight.dtype
    return own if own.is_floating_point else model.dtype


def layer_of(model: GenerativeModel, hidden: int) -> dict[str, Any]:
    """The shape of a model's own decoder layer, as values of a drafter's config."""
    config = model.get_decoder().config
    rope = getattr(config, "rope_parameters", None) or {}
    typed = [values for values in rope.values() if isinstance(values, dict)]  # for each type of layer
    # of several bases the largest, which is that of layers without a window
    theta = max(values.get("rope_theta", 10000.0) for values in typed or [rope])
    return {
        "intermediate": config.intermediate_size, "heads": config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // config.num_attention_heads,
        "rope_theta": float(theta), "norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "target_revision": origin(model)[1] or "",
    }  # fmt: skip


def key_heads(model: GenerativeModel) -> int:
    """The number of key and value heads of the decoder's layers."""
    config = model.get_decoder().config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def readers(text: TextDecoder) -> list[tuple[nn.Module, type]]:
    """The modules of a decoder that need special code to read a draft, each with the mixin for its class."""
    ours = {module: reader for module in each_module(text) if (reader := path_readers.reader(module)) is not None}
    rest = [(module, recurrent.reader(stock(module))) for module in recurrent.modules(text) if module not in ours]
    return [*ours.items(), *rest]


def replaced(read: list[tuple[nn.Module, type]]) -> str | None:
    """Why one of these modules would not run its mixin: somebody else replaced its forward; None: all would."""
    hidden = next((module for module, _ in read if hides(module)), None)
    if hidden is None:
        return None
    return f"its {stock(hidden).__name__} has a forward of its own, which cannot read drafts"


def more_than_states(text: TextDecoder) -> bool:
    """Whether layers of a decoder keep more than the text's keys and values and recurrent states: an indexer's keys, an
    image's keys, or the state of modules that read path by path."""
    config = text.config
    kinds, crossed = getattr(config, "layer_types", None) or (), getattr(config, "cross_attention_layers", None)
    by_path = any(path_readers.reader(module) is not None for module in each_module(text))
    return "indexed_attention" in kinds or bool(crossed) or by_path


def shared_scale(model: GenerativeModel) -> str | None:
    """Why layers that quantize their input for all tokens of a forward together cannot read a draft, or None."""
    for layer in each_module(model.get_decoder(), head(model)):
        if (found := _together(layer)) is not None:
            how, instead = found
            return (
                f"its {stock(layer).__name__} layers {how}, so several drafted tokens in one forward get other values "
                f"than one at a time; {instead}"
            )
    return None


def _together(module: nn.Module) -> tuple[str, str] | None:
    """What a module chooses for all tokens of a forward together, and what to use in its place; None: nothing."""
    kind = stock(module)
    if kind.__module__.startswith(_DYNAMIC):
        packed = getattr(module, "_packed_params", None)
        return None if getattr(packed, "dtype", None) == torch.float16 else _ONE_SCALE  # float16 has no scale
    if kind.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0) > 0:
        return _COLUMNS
    weight = module._parameters.get("weight")
    if weight is None or type(weight) in (nn.Parameter, Tensor):
        return None
    weights = (weight, getattr(weight, "original_weight_tensor", None))  # torchao wraps some
    settings = [getattr(one, name, None) for one in weights for name in ("act_quant_kwargs", "quant_kwargs")]
    grains = [_setting(one, name) for one in settings for name in ("granularity", "activation_granularity")]
    return _ONE_SCALE if any(type(grain).__name__ == "PerTensor" for grain in grains) else None


def _setting(settings: object, name: str) -> object:
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
