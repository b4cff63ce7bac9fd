"""Multi-token-prediction heads, built and loaded by transformers: additional layers of the model's own classes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange, convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.utils import logging

from mmspec.pipelines.drawing.weight_files import listed
from mmspec.pipelines.host.decoder import decoder, dtype_of
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel, PretrainedConfig, TextDecoder


class MtpHeads(MtpModel):
    """`count` additional layers of a model's own classes, each after two norms and a projection; and their rotary."""

    def __init__(self, model: GenerativeModel, count: int) -> None:
        config, text = _config(model, count), decoder(model)
        PreTrainedModel.__init__(self, config)  # MtpModel's own would register the target
        block, norm = block_class(text), stock(text.norm)
        self.layers = nn.ModuleList(MtpLayer(config, block, norm, k) for k in range(count))
        self.rotary = copy.deepcopy(getattr(text, "rotary_emb", None))
        self.post_init()

    @property
    def attention(self) -> str:
        """The name of their attention implementation."""
        return str(self.config._attn_implementation)

    @property
    def kinds(self) -> list[str]:
        """The type of each layer."""
        return list(getattr(self.config, "layer_types", None) or ["full_attention"] * len(self.layers))

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer in positions; None: no limit."""
        return [self.config.sliding_window if kind == "sliding_attention" else None for kind in self.kinds]

    @property
    def hidden(self) -> int:
        return int(self.config.hidden_size)


def filled(model: GenerativeModel, tensors: dict[str, Tensor]) -> MtpHeads:
    """Heads of the target's own classes with exactly these tensors, converted by transformers as the target's are.

    Raises:
        ValueError: tensors are missing, or have other names, shapes or dtypes.
    """
    odd = [f"{name} is {t.dtype}" for name, t in tensors.items() if not t.is_floating_point() or t.itemsize < 2]
    if odd:  # transformers would cast them
        raise ValueError(f"{listed(sorted(odd))}; mmspec reads heads in float16, bfloat16, float32 or float64")
    count = len({key.split(".")[1] for key in tensors})
    heads = MtpHeads(model, count)
    load = LoadStateDictConfig(weight_mapping=_conversions(model), device_map={"": "cpu"}, dtype=dtype_of(model))
    with _quiet():
        info, _ = convert_and_load_state_dict_in_model(model=heads, state_dict=dict(tensors), load_config=load)
    wrong = [f"{name} is {list(got)}, expected {list(expected)}" for name, got, expected in info.mismatched_keys]
    missing, more = sorted(info.missing_keys), sorted(info.unexpected_keys)
    if missing or more or wrong:
        raise ValueError(
            f"missing: {listed(missing)}; unexpected: {listed(more)}; wrong shapes: {listed(sorted(wrong))}. Is the "
            "checkpoint complete, of this model, and not quantized?"
        )
    return heads.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a few tensors."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _conversions(model: GenerativeModel) -> list[Any]:
    """The conversions with which transformers loads the target's own layers, such as merging experts into a tensor."""
    kinds = dict.fromkeys((decoder(model).config.model_type, model.config.model_type))
    mappings = [get_checkpoint_conversion_mapping(kind) or [] for kind in kinds]
    return [one for mapping in mappings for one in mapping if not isinstance(one, PrefixChange)]


def block_class(text: TextDecoder) -> type:
    """The class of the target's layers; if they have several classes, one with attention."""
    attending = (layer for layer in reversed(text.layers) if hasattr(layer, "self_attn"))
    return stock(next(attending, text.layers[-1]))


def _config(model: GenerativeModel, count: int) -> PretrainedConfig:
    """The text config for `count` additional layers, which have full attention unless the config says otherwise."""
    config = copy.deepcopy(decoder(model).config)
    for name, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        kinds = getattr(config, name, None)
        if kinds is not None:
            usual = "full_attention" if name == "layer_types" else kinds[-1]
            setattr(config, name, list(getattr(config, own, None) or [usual] * count)[:count])
    config.num_hidden_layers = count
    if hasattr(config, "first_k_dense_replace"):  # applies to the target's first layers; heads have experts
        config.first_k_dense_replace = 0
    config._attn_implementation = "eager" if config._attn_implementation == "eager" else "sdpa"
    return config
