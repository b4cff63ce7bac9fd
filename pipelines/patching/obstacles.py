"""What keeps a model or a call from being accelerated, as far as it lies in the model's state of the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from mmspec.modes import each_module
from mmspec.pipelines.host import adapters
from mmspec.pipelines.host.assisted import assists
from mmspec.pipelines.host.decoder import text_and_head
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.model import HostModel

# modules of layers that choose a scale for all of their input
_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic", "torch.nn.quantized.dynamic")
BEAMS = "beam search (num_beams > 1) ranks whole sequences; a draft has nothing to save there"


@dataclass(frozen=True)
class Obstacle:
    """Why a call has to run the stock path.

    Attributes:
        reason: what stands in the way, for an error or a warning.
        always_falls_back: take the stock path whatever `on_unsupported` says, since the user could not have known.
    """

    reason: str
    always_falls_back: bool = False


def now(model: Any, config: Any, rows: int) -> Obstacle | None:
    """Why the model cannot be accelerated now: its attention was changed, adapters were added, it assists another
    model.

    Args:
        model: an enabled model of transformers.
        config: the call's generation config.
        rows: of the call.
    """
    if assists(config):
        return Obstacle("it drafts for another model here, a few tokens at a time", always_falls_back=True)
    why = HostModel.of(model).unfit or adapters.soft_prompt(adapters.generating(model)) or shared_scale(model)
    if why is not None:
        return Obstacle(why)
    if rows > 1 and adapters.by_row(model):
        why = "adapter_names counts on rows that stay to the end, and here rows leave as they end"
        return Obstacle(why, always_falls_back=True)
    return None


def shared_scale(model: Any) -> str | None:
    """Why layers that quantize their input with one scale for all tokens of a forward cannot read a draft, or None."""
    found = next(filter(_scales_together, each_module(*text_and_head(model))), None)
    if found is None:
        return None
    return (
        f"its {stock(found).__name__} layers quantize their input with one scale for all tokens of a forward "
        "(quantize_dynamic, or torchao with PerTensor), so several drafted tokens in one forward get other values than "
        "one at a time; quantize the weights alone, or with one scale for each token"
    )


def _scales_together(module: Any) -> bool:
    if stock(module).__module__.startswith(_DYNAMIC):
        return True
    weight = module._parameters.get("weight")
    if weight is None or type(weight) in (Parameter, Tensor):
        return False
    weights = (weight, getattr(weight, "original_weight_tensor", None))  # torchao wraps some
    settings = [getattr(one, name, None) for one in weights for name in ("act_quant_kwargs", "quant_kwargs")]
    grains = [_read(one, name) for one in settings for name in ("granularity", "activation_granularity")]
    return any(type(grain).__name__ == "PerTensor" for grain in grains)


def _read(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
