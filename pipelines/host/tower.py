"""The vision tower of a model, and a mixin through which a call can replace its forward."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from mmspec.modes import stock_class
from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.kinds import GenerativeModel


class TowerTap:
    """Mixin for a vision tower, whose forward `ForwardContext.encode` replaces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encode, run = now().encode, partial(stock_class(type(self)).__call__, self)
        return run(*args, **kwargs) if encode is None else encode(run, *args, **kwargs)


def tower(model: GenerativeModel) -> nn.Module | None:
    """The vision tower, if the model has one that attends by sdpa: a trace does not see other packages' kernels."""
    found: Any = model.get_encoder(modality="image")
    if found is model or found is model.base_model or not isinstance(found, nn.Module):
        return None
    return found if getattr(getattr(found, "config", None), "_attn_implementation", "") == "sdpa" else None
