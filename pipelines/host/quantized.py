"""Finds layers that quantize their inputs with one scale for all tokens of a forward."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module, Parameter

from mmspec.modes import each_module
from mmspec.pipelines.host.decoder import head
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel

# Python modules whose layers choose one scale for their whole input
_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic", "torch.nn.quantized.dynamic")


def shared_scale(model: GenerativeModel) -> str | None:
    """Why layers that quantize their input with one scale for all tokens of a forward cannot read a draft, or None."""
    layer = next(filter(_scales_together, each_module(model.get_decoder(), head(model))), None)
    if layer is None:
        return None
    return (
        f"its {stock(layer).__name__} layers quantize their input with one scale for all tokens of a forward "
        "(quantize_dynamic, or torchao with PerTensor), so several drafted tokens in one forward get other values than "
        "one at a time; quantize only the weights, or with one scale for each token"
    )


def _scales_together(module: Module) -> bool:
    if stock(module).__module__.startswith(_DYNAMIC):
        return True
    weight = module._parameters.get("weight")
    if weight is None or type(weight) in (Parameter, Tensor):
        return False
    weights = (weight, getattr(weight, "original_weight_tensor", None))  # torchao wraps some
    settings = [getattr(one, name, None) for one in weights for name in ("act_quant_kwargs", "quant_kwargs")]
    grains = [_read(one, name) for one in settings for name in ("granularity", "activation_granularity")]
    return any(type(grain).__name__ == "PerTensor" for grain in grains)


def _read(settings: object, name: str) -> object:
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
