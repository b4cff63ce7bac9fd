"""Multi-token-prediction heads as transformers builds and loads them: further layers of a model's own classes."""

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
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel, PretrainedConfig, TextDecoder


class MtpHeads(MtpModel):
    """`count` further layers of a model's own classes, each behind its two norms and a projection; their rotary."""

    def __init__(self, model: GenerativeModel, count: int) -> None:
        config, text = _config(model, count), decoder(model)
        PreTrainedModel.__init__(self, config)  # MtpModel's own would take the target in, and wants a config that tells
        block, norm = block_class(text), stock(text.norm)
        self.layers = nn.ModuleList(MtpLayer(config, block, norm, k) for k in range(count))
        self.rotary = copy.deepcopy(getattr(text, "rotary_emb", None))
        self.post_init()

    @property
    def attention(self) -> str:
        """The implementation by which they attend."""
        return str(self.config._attn_implementation)

    @property
    def kinds(self) -> list[str]:
        """The type of each layer."""
        return list(getattr(self.config, "layer_types", None) or ["full_attention"] * len(self.layers))

    @property
    def windows(self) -> list[int | None]:
        """How many places each layer sees; None: all."""
        return [self.config.sliding_window if kind == "sliding_attention" else None for kind in self.kinds]

    @property
    def hidden(self) -> int:
        return int(self.config.hidden_size)


def filled(model: GenerativeModel, tensors: dict[str, Tensor]) -> MtpHeads:
    """Heads of the target's own classes holding exactly these tensors, which transformers converts as the target's.

    Raises:
        ValueError: some are missing, or of other names or shapes.
    """
    count = len({key.split(".")[1] for key in tensors})
    made = MtpHeads(model, count)
    load = LoadStateDictConfig(weight_mapping=_conversions(model), device_map={"": "cpu"}, dtype=model.dtype)
    with _quiet():
        info, _ = convert_and_load_state_dict_in_model(model=made, state_dict=dict(tensors), load_config=load)
    wrong = [f"{name} is {list(mine)}, expected {list(theirs)}" for name, mine, theirs in info.mismatched_keys]
    lack, more = sorted(info.missing_keys), sorted(info.unexpected_keys)
    if lack or more or wrong:
        raise ValueError(
            f"missing: {listed(lack)}; unexpected: {listed(more)}; wrong shapes: {listed(sorted(wrong))}. Is the "
            "checkpoint complete, of this model, and not quantized?"
        )
    return made.eval()


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
    """What transformers makes of the target's own layers when it loads them, such as one tensor of single experts."""
    kinds = dict.fromkeys((decoder(model).config.model_type, model.config.model_type))
    each = [get_checkpoint_conversion_mapping(kind) or [] for kind in kinds]
    return [one for some in each for one in some if not isinstance(one, PrefixChange)]


def block_class(text: TextDecoder) -> type:
    """The class of the target's layers, one with attention where they are of several classes."""
    attending = (layer for layer in reversed(text.layers) if hasattr(layer, "self_attn"))
    return stock(next(attending, text.layers[-1]))


def _config(model: GenerativeModel, count: int) -> PretrainedConfig:
    """The text config, for `count` further layers whose attention sees everything unless the config says otherwise."""
    config = copy.deepcopy(decoder(model).config)
    for name, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        kinds = getattr(config, name, None)
        if kinds is not None:
            usual = "full_attention" if name == "layer_types" else kinds[-1]
            setattr(config, name, list(getattr(config, own, None) or [usual] * count)[:count])
    config.num_hidden_layers = count
    if hasattr(config, "first_k_dense_replace"):  # of the target's layers; heads have experts
        config.first_k_dense_replace = 0
    config._attn_implementation = "eager" if config._attn_implementation == "eager" else "sdpa"
    return config
